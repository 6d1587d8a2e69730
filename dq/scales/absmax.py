"""`absmax`: `scale = amax / divisor`: nothing is clipped."""

from torch import Tensor

from dq.scales import SCALE_RULES, Blocks, ScaleRule, storable


def choose(blocks: Blocks) -> Tensor:
    """The largest value of a block lands on the largest code."""
    return storable(blocks.absmax(), blocks.spec)


SCALE_RULES.register(ScaleRule("absmax", choose))
