"""Round to nearest: `q = clip(rne(W / scale))` at the scales of the spec's rule."""

from torch import Tensor

from dq.qtensor import QTensor, quantize
from dq.rounding import ROUNDINGS, Rounding
from dq.scales import find_rule
from dq.spec import QuantSpec


def rtn(
    weight: Tensor, spec: QuantSpec, *, x: Tensor | None = None, amax: Tensor | None = None, name: str = "weight"
) -> QTensor:
    """Rounds W' [N, K] element by element; weighted scale rules take E[x_k^2] or E[x x^T] from the sample x [n, K].

    Raises:
        DQError: NaN/Inf in the weight, or a weighted rule without calibration.
    """
    needs = find_rule(spec).needs
    statistics = {}
    if x is not None and needs == "importance":
        statistics["importance"] = x.square().mean(0)
    elif x is not None and needs == "hessian":
        statistics["hessian"] = x.T @ x / max(len(x), 1)
    return quantize(weight, spec, amax=amax, name=name, **statistics)


ROUNDINGS.register(Rounding("rtn", rtn))
