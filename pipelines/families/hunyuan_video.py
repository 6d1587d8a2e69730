"""HunyuanVideo, its FramePack and image models (the double and single blocks of FLUX.1) and 1.5 (double blocks only).

In single blocks text and image are joined anew inside the attention: proj_mlp reads the same values as q, k and v in
another tensor. The token refiner of the text stays in 16 bits.
"""

from dq.family import FAMILIES, Family
from dq.pipelines.families.common import ADDED, OUT, QKV, two_streams, under
from dq.pipelines.families.flux import FOLDS, GROUPS

FAMILIES.register(
    Family(
        name="hunyuan-video",
        classes=(
            "HunyuanVideoTransformer3DModel",
            "HunyuanVideoFramepackTransformer3DModel",
            "HunyuanImageTransformer2DModel",
        ),
        folds=FOLDS,
        **GROUPS,
    )
)

_BLOCK = "transformer_blocks.*"
_GROUPS = (under(f"{_BLOCK}.attn", *QKV), under(f"{_BLOCK}.attn", *ADDED))

FAMILIES.register(
    Family(
        name="hunyuan-video-1.5",
        classes=("HunyuanVideo15Transformer3DModel",),
        blocks=(_BLOCK,),
        inputs=_GROUPS,
        smooth=(under(f"{_BLOCK}.attn", *OUT),),
        lowrank=_GROUPS,
        folds=two_streams(_BLOCK, ("norm1.linear", "norm1_context.linear"), ("ff.net.0.proj", "ff_context.net.0.proj")),
    )
)
