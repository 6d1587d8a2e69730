"""Sana, Sana-Sprint and Sana-Video (diffusers `SanaTransformer2DModel`, `SanaVideoTransformer3DModel`).

attn1 is linear attention: its output is linear in the values, so the factor of to_out folds into to_v there too. The
feed-forward networks are convolutions. One modulation for all blocks plus tables per block: nothing folds into it.
"""

from dq.family import FAMILIES, Family
from dq.pipelines.families.common import QKV, under, values

_BLOCK = "transformer_blocks.*"
_GROUPS = (under(f"{_BLOCK}.attn1", *QKV), under(f"{_BLOCK}.attn2", *QKV[1:]))

FAMILIES.register(
    Family(
        name="sana",
        classes=("SanaTransformer2DModel", "SanaVideoTransformer3DModel"),
        blocks=(_BLOCK,),
        inputs=_GROUPS,
        lowrank=_GROUPS,
        folds=(values(f"{_BLOCK}.attn1"), values(f"{_BLOCK}.attn2")),
    )
)
