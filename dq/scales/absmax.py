"""`absmax`: `scale = amax / divisor`: nothing is clipped."""

from collections.abc import Callable

from torch import Tensor

from dq.scales import SCALE_RULES, Blocks, ScaleRule, storable


def choose(blocks: Blocks) -> Tensor:
    """The largest value of a block lands on the largest code."""
    return storable(blocks.absmax(), blocks.spec)


def whole(blocks: Blocks, fake: Callable[[Tensor], Tensor]) -> Tensor:
    """With a zero point: all from min to max."""
    return blocks.x


SCALE_RULES.register(ScaleRule("absmax", choose, clip=whole))
