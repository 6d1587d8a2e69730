"""Round to nearest: `q = clip(rne(W / scale))` at absmax scales."""

from torch import Tensor

from dq.qtensor import QTensor, quantize
from dq.rounding import ROUNDINGS, Rounding
from dq.spec import QuantSpec


def rtn(
    weight: Tensor, spec: QuantSpec, *, x: Tensor | None = None, amax: Tensor | None = None, name: str = "weight"
) -> QTensor:
    """Rounds W' [N, K] independently of the data.

    Raises:
        DQError: NaN/Inf in the weight.
    """
    return quantize(weight, spec, amax=amax, name=name)


ROUNDINGS.register(Rounding("rtn", rtn))
