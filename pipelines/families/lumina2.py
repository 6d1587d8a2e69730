"""Lumina-Image 2.0 (diffusers `Lumina2Transformer2DModel`): one stream, grouped queries, SwiGLU.

norm1 is an RMS norm and its modulation (which only scales) in one; the text refiner has the norm alone. linear_3 is the
linear half of the SwiGLU. Several heads read each row of v, so the factor of to_out stays.
"""

from dq.family import FAMILIES, Family, Fold
from dq.pipelines.families.common import QKV, under

_BLOCKS = ("layers.*", "noise_refiner.*", "context_refiner.*")
_GROUPS = tuple(
    group for b in _BLOCKS for group in (under(f"{b}.attn", *QKV), under(f"{b}.feed_forward", "linear_1", "linear_3"))
)


def _folds(block: str) -> tuple[Fold, ...]:
    norm = f"{block}.norm1" if block.startswith("context") else f"{block}.norm1.norm"
    return (
        Fold("norm", under(f"{block}.attn", *QKV), (norm,)),
        Fold("norm", under(f"{block}.feed_forward", "linear_1", "linear_3"), (f"{block}.ffn_norm1",)),
        Fold("rows", (f"{block}.feed_forward.linear_2",), (f"{block}.feed_forward.linear_3",)),
    )


FAMILIES.register(
    Family(
        name="lumina2",
        classes=("Lumina2Transformer2DModel",),
        blocks=_BLOCKS,
        inputs=_GROUPS,
        lowrank=_GROUPS,
        wide=((r"^(noise|context)_refiner\.", "refiner, takes 8 bits at least"),),
        folds=tuple(fold for block in _BLOCKS for fold in _folds(block)),
    )
)
