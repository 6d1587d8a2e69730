"""CogVideoX and ConsisID (diffusers `CogVideoXTransformer3DModel`, `ConsisIDTransformer3DModel`).

Text and video are modulated apart and then read by one attention and one MLP together, so both pairs of shift and
scale in norm1.linear and norm2.linear (chunks 0, 1 and 3, 4 of six) take the factor.
"""

from dq.family import FAMILIES, Family, Fold
from dq.pipelines.families.common import QKV, under, values

_BLOCK = "transformer_blocks.*"
_QKV = under(f"{_BLOCK}.attn1", *QKV)

FAMILIES.register(
    Family(
        name="cogvideox",
        classes=("CogVideoXTransformer3DModel", "ConsisIDTransformer3DModel"),
        blocks=(_BLOCK,),
        inputs=(_QKV,),
        lowrank=(_QKV,),
        folds=(
            values(f"{_BLOCK}.attn1"),
            Fold("modulation", _QKV, (f"{_BLOCK}.norm1.linear",), 6, (0, 1, 3, 4)),
            Fold("modulation", (f"{_BLOCK}.ff.net.0.proj",), (f"{_BLOCK}.norm2.linear",), 6, (0, 1, 3, 4)),
        ),
    )
)
