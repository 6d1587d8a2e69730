"""Chroma (diffusers `ChromaTransformer2DModel`): FLUX.1 whose modulations come from one small network for all blocks.

distilled_guidance_layer makes every shift, scale and gate and stays in 16 bits; no weight in a block makes them, so
only the values of the joint attention take a factor.
"""

from dq.family import FAMILIES, HIGH_PRECISION, Family
from dq.pipelines.families.common import ADDED, OUT, QKV, under, values

_BLOCK, _SINGLE = "transformer_blocks.*", "single_transformer_blocks.*"
_QKV, _ADDED = under(f"{_BLOCK}.attn", *QKV), under(f"{_BLOCK}.attn", *ADDED)
_SINGLE_QKV = under(f"{_SINGLE}.attn", *QKV)

FAMILIES.register(
    Family(
        name="chroma",
        classes=("ChromaTransformer2DModel",),
        blocks=(_BLOCK, _SINGLE),
        inputs=(_QKV, _ADDED, (*_SINGLE_QKV, f"{_SINGLE}.proj_mlp")),
        smooth=(under(f"{_BLOCK}.attn", *OUT),),
        lowrank=(_QKV, _ADDED, _SINGLE_QKV),
        k_parts=((f"{_SINGLE}.proj_out", (f"{_SINGLE}.attn.to_v", "...")),),
        high_precision=(*HIGH_PRECISION, (r"^distilled_guidance_layer\.", "modulation shared by all blocks")),
        folds=(values(f"{_BLOCK}.attn", text=True),),
    )
)
