"""What every registered format must do. A new format is covered by being registered; nothing here names one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dq.spec import FORMATS

NAMES = FORMATS.names()
# float32 multiples of the largest value: most inside the grid, some beyond it, ties and subnormals included.
inside = st.floats(-1.25, 1.25, width=32)
numbers = st.one_of(inside, st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-38, 1e30, -1e30]))
rows = st.lists(numbers, min_size=1, max_size=40)


def grid(fmt):
    """Every value that `encode` may produce, sorted; codes outside [min, max] (a -8 of other tools, NaN) left out."""
    values = fmt.decode(torch.arange(2**fmt.bits, dtype=torch.uint8).view(fmt.dtype))
    values = values[torch.isfinite(values) & (values >= fmt.min) & (values <= fmt.max)]
    return values.unique()  # -0 and 0 are one value


def tensor(fmt, row):
    return torch.tensor(row, dtype=torch.float32) * fmt.max


@pytest.mark.parametrize("name", NAMES)
@given(row=rows)
def test_decode_of_encode_is_round(name, row):
    fmt = FORMATS.get(name)
    x = tensor(fmt, row)
    codes = fmt.encode(x)
    assert codes.dtype == fmt.dtype and codes.shape == x.shape
    assert torch.equal(fmt.decode(codes), fmt.round(x))


@pytest.mark.parametrize("name", NAMES)
@given(row=rows)
def test_round_is_idempotent_and_saturates(name, row):
    fmt = FORMATS.get(name)
    once = fmt.round(tensor(fmt, row))
    assert torch.equal(fmt.round(once), once)
    assert once.min() >= fmt.min and once.max() <= fmt.max


@pytest.mark.parametrize("name", NAMES)
@given(row=rows)
def test_round_is_monotonic(name, row):
    fmt = FORMATS.get(name)
    y = fmt.round(tensor(fmt, row).sort().values)
    assert (y.diff() >= 0).all()


@pytest.mark.parametrize("name", NAMES)
@given(row=rows)
def test_round_is_nearest_with_ties_to_even(name, row):
    """No grid point is closer; between two equally close ones the even code wins (house rule for every format)."""
    fmt, points = FORMATS.get(name), grid(FORMATS.get(name)).double()
    x = tensor(fmt, row).clamp(fmt.min, fmt.max)
    distance = (x.double()[:, None] - points).abs()
    error = (fmt.round(x).double() - x.double()).abs()
    assert torch.equal(error, distance.amin(1))
    tied = (distance == distance.amin(1, keepdim=True)).sum(1) == 2
    codes = fmt.encode(x[tied]).view(torch.uint8)
    assert not (codes & 1).any()


@pytest.mark.parametrize("name", NAMES)
@given(row=rows)
def test_round_is_symmetric(name, row):
    fmt = FORMATS.get(name)
    points = grid(fmt)
    if not torch.equal(points, -points.flip(0)):
        pytest.skip("the grid is not symmetric")
    x = tensor(fmt, row)
    assert torch.equal(fmt.round(-x), -fmt.round(x))


@pytest.mark.parametrize("name", NAMES)
def test_grid_points_are_fixed(name):
    fmt = FORMATS.get(name)
    points = grid(fmt)
    assert points[0] == fmt.min and points[-1] == fmt.max and 0 in points
    assert torch.equal(fmt.round(points), points)
    ends = fmt.round(torch.tensor([float("inf"), float("-inf"), 3e38, -3e38]))
    assert ends.tolist() == [fmt.max, fmt.min, fmt.max, fmt.min]


@pytest.mark.parametrize("name", [f.name for f in FORMATS if f.bits == 4])
def test_zero_has_one_code(name):
    """-0 and values that round to it are packed like 0, so that equal tensors have equal bytes."""
    codes = FORMATS.get(name).encode(torch.tensor([0.0, -0.0, -1e-30, 1e-30]))
    assert (codes.view(torch.uint8) == codes[0].view(torch.uint8)).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [0, 1, 2, 5, 16, 33])
def test_unpack_inverts_pack(name, width):
    fmt = FORMATS.get(name)
    codes = fmt.encode((torch.rand(3, width) * 2 - 1) * fmt.max)
    stored = fmt.pack(codes)
    assert stored.dtype == fmt.storage and stored.shape == (3, fmt.packed_width(width))
    back = fmt.unpack(stored, width)
    assert back.shape == (3, width)
    mask = 2**fmt.bits - 1
    assert torch.equal(back.view(torch.uint8) & mask, codes.view(torch.uint8) & mask)
    assert torch.equal(fmt.unpack_values(stored, width), fmt.decode(codes))


@pytest.mark.parametrize("name", NAMES)
def test_unpack_keeps_leading_axes(name):
    fmt = FORMATS.get(name)
    codes = fmt.encode((torch.rand(2, 3, 7) * 2 - 1) * fmt.max)
    assert torch.equal(fmt.unpack_values(fmt.pack(codes), 7), fmt.decode(codes))


@pytest.mark.parametrize("name", NAMES)
def test_table_agrees_with_decode(name):
    fmt = FORMATS.get(name)
    if fmt.table is None:
        assert fmt.bits != 4, "a 4-bit format needs a table: it is how packed bytes are decoded"
        return
    assert list(fmt.table) == fmt.decode(torch.arange(2**fmt.bits, dtype=torch.uint8).view(fmt.dtype)).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_encode_leaves_its_input_alone(name):
    x = torch.linspace(-3, 3, 50)
    before = x.clone()
    FORMATS.get(name).encode(x)
    FORMATS.get(name).round(x)
    assert torch.equal(x, before)
