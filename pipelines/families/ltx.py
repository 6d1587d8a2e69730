"""LTX-Video and LTX-2 (diffusers `LTXVideoTransformer3DModel`, `LTX2VideoTransformer3DModel`).

Norms without weights and tables per block plus one embedding for all blocks: only the values of an attention take a
factor. LTX-2 has a second, narrower stream for sound and attends across both.
"""

from dq.family import FAMILIES, Family
from dq.pipelines.families.common import QKV, under, values

_BLOCK = "transformer_blocks.*"
_SELF, _CROSS = ("attn1", "audio_attn1"), ("attn2", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
_GROUPS = (
    *(under(f"{_BLOCK}.{attention}", *QKV) for attention in _SELF),
    *(under(f"{_BLOCK}.{attention}", *QKV[1:]) for attention in _CROSS),
)

FAMILIES.register(
    Family(
        name="ltx",
        classes=("LTXVideoTransformer3DModel", "LTX2VideoTransformer3DModel", "SanaWMLTX2RefinerTransformer3DModel"),
        blocks=(_BLOCK,),
        inputs=_GROUPS,
        lowrank=_GROUPS,
        folds=tuple(values(f"{_BLOCK}.{attention}") for attention in (*_SELF, *_CROSS)),
    )
)
