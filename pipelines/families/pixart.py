"""PixArt-alpha and PixArt-Sigma (diffusers `PixArtTransformer2DModel`).

One adaln_single for all blocks plus a table per block makes shift and scale, so no factor folds into a weight there.
Keys and values of the text (attn2) read the same caption projection in every block and at every step: they stay in 16
bits. ff.net.2 reads a GELU.
"""

from dq.family import FAMILIES, Family
from dq.pipelines.families.common import QKV, under, values

_BLOCK = "transformer_blocks.*"
_GROUPS = (under(f"{_BLOCK}.attn1", *QKV), under(f"{_BLOCK}.attn2", *QKV[1:]))

FAMILIES.register(
    Family(
        name="pixart",
        classes=("PixArtTransformer2DModel",),
        blocks=(_BLOCK,),
        inputs=_GROUPS,
        lowrank=_GROUPS,
        folds=(values(f"{_BLOCK}.attn1"), values(f"{_BLOCK}.attn2")),
    )
)
