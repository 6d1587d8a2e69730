"""DiT (diffusers `DiTTransformer2DModel`): class-conditional, a modulation and a timestep embedder in every block."""

from dq.family import FAMILIES, Family, Fold
from dq.pipelines.families.common import QKV, under, values

_BLOCK = "transformer_blocks.*"
_QKV, _NORM = under(f"{_BLOCK}.attn1", *QKV), (f"{_BLOCK}.norm1.linear",)

FAMILIES.register(
    Family(
        name="dit",
        classes=("DiTTransformer2DModel",),
        blocks=(_BLOCK,),
        inputs=(_QKV,),
        lowrank=(_QKV,),
        folds=(
            values(f"{_BLOCK}.attn1"),
            Fold("modulation", _QKV, _NORM, 6, (0, 1)),
            Fold("modulation", (f"{_BLOCK}.ff.net.0.proj",), _NORM, 6, (3, 4)),
        ),
    )
)
