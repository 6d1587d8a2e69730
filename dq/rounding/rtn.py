"""Round to nearest: `q = clip(rne(W / scale))` at the scales of the spec's rule."""

from dq.qtensor import QTensor, quantize
from dq.rounding import ROUNDINGS, Job, Rounding


def rtn(job: Job) -> tuple[QTensor, QTensor | None]:
    """Rounds element by element; weighted scale rules take E[x_k^2] or E[x x^T] of the input.

    Raises:
        DQError: NaN/Inf in the weight, or a weighted rule without calibration.
    """
    main = quantize(job.weight, job.spec, amax=job.amax, name=job.name, **job.statistics())
    return main, job.left_over(main)


ROUNDINGS.register(Rounding("rtn", rtn))
