"""Qwen-Image (diffusers `QwenImageTransformer2DModel`): two streams in every block, named as in SD3.

img_mod.1 and txt_mod.1, a third of the parameters, make shift, scale, gate of the attention and of the MLP.
"""

from dq.family import FAMILIES, Family
from dq.pipelines.families.common import ADDED, OUT, QKV, two_streams, under

_BLOCK = "transformer_blocks.*"
_GROUPS = (under(f"{_BLOCK}.attn", *QKV), under(f"{_BLOCK}.attn", *ADDED))

FAMILIES.register(
    Family(
        name="qwen-image",
        classes=("QwenImageTransformer2DModel",),
        blocks=(_BLOCK,),
        inputs=_GROUPS,
        smooth=(under(f"{_BLOCK}.attn", *OUT),),
        lowrank=_GROUPS,
        folds=two_streams(_BLOCK, ("img_mod.1", "txt_mod.1"), ("img_mlp.net.0.proj", "txt_mlp.net.0.proj")),
    )
)
