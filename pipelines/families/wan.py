"""Wan 2.1 and 2.2 (diffusers `WanTransformer3DModel`; 2.2 has two of them) and models of the same blocks.

Shift and scale are a table per block plus one embedding for all blocks: nothing folds there. The norm before the
cross-attention is an affine one, whose weight takes the factor of attn2.to_q. Keys and values of the text, and of the
image of image-to-video models, are constant over steps: they stay in 16 bits. ffn.net.2 reads a GELU.
"""

from dq.family import FAMILIES, Family, Fold
from dq.pipelines.families.common import QKV, under, values

_BLOCKS = ("blocks.*", "vace_blocks.*")
_IMAGE = ("add_k_proj", "add_v_proj")
_GROUPS = tuple(
    under(f"{block}.{attention}", *names)
    for block in _BLOCKS
    for attention, names in (("attn1", QKV), ("attn2", QKV[1:]), ("attn2", _IMAGE))
)


def _folds(block: str) -> tuple[Fold, ...]:
    cross = Fold("rows", (f"{block}.attn2.to_out.0",), under(f"{block}.attn2", "to_v", "add_v_proj"))
    return values(f"{block}.attn1"), cross, Fold("norm", (f"{block}.attn2.to_q",), (f"{block}.norm2",))


FAMILIES.register(
    Family(
        name="wan",
        classes=(
            "WanTransformer3DModel",
            "WanVACETransformer3DModel",
            "WanAnimateTransformer3DModel",
            "SkyReelsV2Transformer3DModel",
            "ChronoEditTransformer3DModel",
        ),
        blocks=_BLOCKS,
        inputs=_GROUPS,
        lowrank=_GROUPS,
        folds=tuple(fold for block in _BLOCKS for fold in _folds(block)),
    )
)
