"""UNets of Stable Diffusion 1.x, 2.x and XL (diffusers `UNet2DConditionModel`): linears of their transformer blocks.

Norms are affine and take the factors of what reads them; of a GEGLU the first half is the linear one. Keys and values
of the text (attn2) are constant over steps and stay in 16 bits, as do the projections in and out of an attention.
A 1x1 `conv_shortcut` of the up path reads [hidden | skip], whose ranges differ: two parts with scales of their own
(Q-Diffusion, arXiv 2302.04304, section 4.2).
"""

from dq.family import FAMILIES, Family, Fold
from dq.pipelines.families.common import QKV, under, values

_BLOCKS = tuple(f"{part}.attentions.*.transformer_blocks.*" for part in ("down_blocks.*", "mid_block", "up_blocks.*"))
_GROUPS = tuple(
    group for block in _BLOCKS for group in (under(f"{block}.attn1", *QKV), under(f"{block}.attn2", *QKV[1:]))
)


def _folds(block: str) -> tuple[Fold, ...]:
    return (
        values(f"{block}.attn1"),
        values(f"{block}.attn2"),
        Fold("norm", under(f"{block}.attn1", *QKV), (f"{block}.norm1",)),
        Fold("norm", (f"{block}.attn2.to_q",), (f"{block}.norm2",)),
        Fold("norm", (f"{block}.ff.net.0.proj",), (f"{block}.norm3",)),
        Fold("rows", (f"{block}.ff.net.2",), (f"{block}.ff.net.0.proj",), 2, (0,)),
    )


def _deep(block: int, resnet: int) -> str:
    """The convolution that fixes the channels of what comes from below into a resnet of the up path."""
    if resnet:
        return f"up_blocks.{block}.resnets.{resnet - 1}.conv2"
    return f"up_blocks.{block - 1}.upsamplers.0.conv" if block else "mid_block.resnets.1.conv2"


_SHORTCUTS = tuple(
    (f"up_blocks.{i}.resnets.{j}.conv_shortcut", (_deep(i, j), "...")) for i in range(5) for j in range(5)
)

FAMILIES.register(
    Family(
        name="unet",
        classes=("UNet2DConditionModel",),
        blocks=_BLOCKS,
        inputs=_GROUPS,
        lowrank=_GROUPS,
        k_parts=_SHORTCUTS,
        folds=tuple(fold for block in _BLOCKS for fold in _folds(block)),
    )
)
