"""Z-Image (diffusers `ZImageTransformer2DModel`): one stream, RMS norms with a weight, SwiGLU.

The modulation only scales, `RMSNorm(x) * g * (1 + scale)`, so the factors of q, k, v and of w1, w3 fold into g; that
of w2 into w3, the linear half. adaLN_modulation reads 256 channels and stays in 16 bits. The two refiners see little
noise or none and take 8 bits at least.
"""

from dq.family import FAMILIES, HIGH_PRECISION, Family, Fold
from dq.pipelines.families.common import QKV, under, values

_BLOCKS = ("layers.*", "noise_refiner.*", "context_refiner.*")
_GROUPS = tuple(
    group for b in _BLOCKS for group in (under(f"{b}.attention", *QKV), under(f"{b}.feed_forward", "w1", "w3"))
)


def _folds(block: str) -> tuple[Fold, ...]:
    return (
        values(f"{block}.attention"),
        Fold("norm", under(f"{block}.attention", *QKV), (f"{block}.attention_norm1",)),
        Fold("norm", under(f"{block}.feed_forward", "w1", "w3"), (f"{block}.ffn_norm1",)),
        Fold("rows", (f"{block}.feed_forward.w2",), (f"{block}.feed_forward.w3",)),
    )


FAMILIES.register(
    Family(
        name="z-image",
        classes=("ZImageTransformer2DModel",),
        blocks=_BLOCKS,
        inputs=_GROUPS,
        lowrank=_GROUPS,
        high_precision=(*HIGH_PRECISION, (r"adaLN_modulation", "modulation of 256 channels")),
        wide=((r"^(noise|context)_refiner\.", "refiner, takes 8 bits at least"),),
        folds=tuple(fold for block in _BLOCKS for fold in _folds(block)),
    )
)
