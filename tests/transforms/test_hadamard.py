"""Hadamard matrices by construction, the coverage table of methods section 3.6, and products with them."""

import pytest
import torch

from dq.registry import DQError
from dq.transforms.hadamard import ORDERS, factors, matrix, multiply, split
from dq.transforms.rotate import full_size


@pytest.mark.parametrize("order", ORDERS)
def test_constructions(order):
    """Entries +-1 and `H H^T = n I`, exactly."""
    h = (matrix("order", order, torch.float64) * order**0.5).round()
    assert torch.equal(h.abs(), torch.ones_like(h))
    assert torch.equal(h @ h.T, order * torch.eye(order, dtype=torch.float64))


def test_sylvester():
    h = matrix("sylvester", 4, torch.float64) * 2
    assert h.tolist() == [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]


@pytest.mark.parametrize(
    ("width", "parts"),
    [
        (3072, (12, 256)),
        (12288, (12, 1024)),
        (15360, (60, 256)),
        (5120, (40, 128)),
        (13824, (108, 128)),
        (8960, (140, 64)),
        (11008, (172, 64)),
        (14336, (28, 512)),
        (1536, (12, 128)),
        (8192, (1, 8192)),
        (1152, (36, 32)),
    ],
)
def test_covered_widths(width, parts):
    assert split(width) == parts
    assert full_size(width) == width


@pytest.mark.parametrize(("width", "size"), [(2432, 128), (18944, 512), (4864, 256), (37, 0), (1, 0), (2, 2)])
def test_other_widths_take_the_largest_power_of_two(width, size):
    assert full_size(width) == size


def test_factors():
    """None above 256, as equal as possible; regular ones are powers of four."""
    assert factors(12288) == (("order", 12), ("sylvester", 32), ("sylvester", 32))
    assert factors(256) == (("sylvester", 256),)
    assert factors(1024, regular=True) == (("regular", 64), ("regular", 16))
    for size in (2, 52, 4096, 8192, 15360, 65536):
        orders = [n for _, n in factors(size)]
        assert torch.tensor(orders).prod() == size and max(orders) <= 256


@pytest.mark.parametrize("size", [76, 2432, 7, 0, -4])
def test_unreachable_sizes_are_refused(size):
    with pytest.raises(DQError, match=f"no Hadamard matrix of size {size} here"):
        factors(size)


@pytest.mark.parametrize("size", [24, 156, 512, 1120])
def test_products_by_factors(size):
    """Factor by factor is the product with the Kronecker product; the inverse is the transpose."""
    whole = torch.ones(1, 1, dtype=torch.float64)
    for kind, order in factors(size):
        whole = torch.kron(whole, matrix(kind, order, torch.float64))
    x = torch.randn(3, 2 * size, dtype=torch.float64)
    expected = torch.cat([part @ whole for part in x.split(size, 1)], 1)
    torch.testing.assert_close(multiply(x, size), expected)
    torch.testing.assert_close(multiply(multiply(x, size), size, inverse=True), x)


def test_only_inverse_undoes_where_the_matrix_is_not_symmetric():
    h = matrix("order", 12, torch.float64)
    assert not torch.equal(h, h.T)
    x = torch.randn(5, 24, dtype=torch.float64)
    assert not torch.allclose(multiply(multiply(x, 24), 24), x)
