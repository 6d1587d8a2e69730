"""Weights on which two tools must give the same bytes, and the comparison. Other tools are imported by the tests."""

import pytest
import torch

from dq.qtensor import QTensor

ROWS, WIDTH = 24, 3 * 128  # an odd multiple of every group size


def _ties(generator: torch.Generator) -> torch.Tensor:
    """Quotients exactly between two codes: halves for integers at the scale 1, the E2M1 bounds, E4M3 midpoints."""
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 0.5, 1.5, 4.5, 5.5, 17.0, 7.5, 0.0, 3.0])
    x = bounds[torch.randint(0, len(bounds), (ROWS, WIDTH), generator=generator)]
    x[:, ::16] = torch.tensor([6.0, 7.5, 448.0, 127.5])[torch.arange(ROWS) % 4, None]
    return x * torch.randint(0, 2, x.shape, generator=generator).mul(2).sub(1)


def _rare(generator: torch.Generator) -> torch.Tensor:
    """Rows from subnormal to huge, zero rows, zero blocks, negative zeros, one outlier; rows of one sign."""
    x = torch.randn(ROWS, WIDTH, generator=generator)
    x[0] = 0
    x[1, :128] = 0
    x[2] *= 1e-40
    x[3] *= 1e-30
    x[4] = -0.0
    x[5, 7] = 3e4
    x[6] = x[6].abs()
    x[7] = -x[7].abs()
    x[8, ::3] = -0.0
    x[9] *= 2.0 ** torch.randint(-30, 5, (WIDTH,), generator=generator)
    x[10] = 2.0 ** torch.randint(-12, 9, (WIDTH,), generator=generator)
    x[11] = 1.0
    return x


def _weights() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    normal = torch.randn(ROWS, WIDTH, generator=g)
    heavy = torch.distributions.StudentT(3.0).sample((ROWS, WIDTH))
    outlier = normal * 0.02
    outlier[3, 100] = 1e4
    values = {
        "normal": normal,
        "small": normal * 0.02,
        "heavy": heavy,
        "outlier": outlier,
        "ties": _ties(g),
        "rare": _rare(g),
        "1e-30": normal * 1e-30,
        "1e30": normal * 1e30,
        "subnormal": normal * 1e-40,
        "zeros": torch.zeros(ROWS, WIDTH),
    }
    return values | {f"{name}-bf16": x.bfloat16() for name, x in values.items()}


WEIGHTS = _weights()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "weight" in metafunc.fixturenames:
        metafunc.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS.keys())


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8).reshape(*x.shape, -1)


def _same(ours: torch.Tensor, theirs: torch.Tensor, what: str, keep: torch.Tensor | None = None) -> None:
    """Equal bytes, in the rows or blocks of `keep` alone."""
    assert ours.dtype.itemsize == theirs.dtype.itemsize, f"{what}: {ours.dtype} and {theirs.dtype}"
    assert ours.shape == theirs.shape, f"{what}: {tuple(ours.shape)} and {tuple(theirs.shape)}"
    differs = (_bytes(ours) != _bytes(theirs)).any(-1)
    if keep is not None:
        differs = differs & keep.repeat_interleave(differs.shape[1] // keep.shape[1], 1)
    assert not differs.any(), (
        f"{what}: {int(differs.sum())} of {differs.numel()} differ, first at {differs.nonzero()[0]}"
    )


def _check(q: QTensor, codes: torch.Tensor, scale: torch.Tensor, global_scale=None, keep=None) -> None:
    """Codes, scales and second level of a QTensor against those of a tool.

    Args:
        keep: bool [rows, blocks]: what to compare where the tool is wrong elsewhere; default: all.
    """
    assert keep is None or keep.any(), "nothing left to compare"
    if global_scale is not None:
        _same(q.global_scale.reshape(-1), global_scale.reshape(-1), "global scale")
    _same(q.scale, scale.reshape(q.scale.shape), "scales", keep)
    _same(q.codes, codes, "codes", keep)


@pytest.fixture
def check():
    return _check
