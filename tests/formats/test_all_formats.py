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


def every_code(fmt):
    """All 2^bits codes in their own dtype."""
    whole = torch.int16 if fmt.bits == 16 else torch.uint8
    return torch.arange(2**fmt.bits).to(whole).view(fmt.dtype)


def raw(fmt, codes):
    """Codes as integers of `bits` bits, whatever their dtype."""
    whole = torch.int16 if fmt.bits == 16 else torch.uint8
    return codes.contiguous().view(whole).to(torch.int32) & (2**fmt.bits - 1)


def grid(fmt):
    """Every value that `encode` may produce, sorted; codes outside [min, max] (a -8 of other tools, NaN) left out."""
    values = fmt.decode(every_code(fmt))
    values = values[torch.isfinite(values) & (values >= fmt.min) & (values <= fmt.max)]
    return values.unique()  # -0 and 0 are one value


def dyadic(fmt):
    """Whether every value is a whole multiple of the smallest one: then the middle of two neighbours is a float32, and
    which code is the even one has a meaning. A codebook of arbitrary values has neither."""
    points = grid(fmt).double()
    return bool((torch.remainder(points, points[points > 0].min()) == 0).all())


SYMMETRIC = [n for n in NAMES if torch.equal(grid(FORMATS.get(n)), -grid(FORMATS.get(n)).flip(0))]


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
    """No grid point is closer; between two equally close ones the even code wins (house rule for every dyadic grid).

    The bounds of a codebook of arbitrary values are themselves rounded to float32: it is held to one unit of that.
    """
    fmt, points = FORMATS.get(name), grid(FORMATS.get(name)).double()
    x = tensor(fmt, row).clamp(fmt.min, fmt.max)
    below = points[(torch.searchsorted(points, x.double(), right=True) - 1).clamp(min=0)]
    above = points[torch.searchsorted(points, x.double()).clamp(max=len(points) - 1)]
    down, up = (x.double() - below).abs(), (above - x.double()).abs()
    error = (fmt.round(x).double() - x.double()).abs()
    if not dyadic(fmt):
        assert (error <= torch.minimum(down, up) + 2.0**-24 * fmt.max).all()
        return
    assert torch.equal(error, torch.minimum(down, up))
    tied = (down == up) & (below != above)
    assert not (raw(fmt, fmt.encode(x[tied])) & 1).any()


@pytest.mark.parametrize("name", [n for n in NAMES if dyadic(FORMATS.get(n))])
def test_every_tie_goes_to_the_even_code(name):
    """All the middles between neighbours of a grid, not only those that hypothesis meets."""
    fmt, points = FORMATS.get(name), grid(FORMATS.get(name))
    middle = (points[:-1].double() + points[1:].double()) / 2
    exact = middle.float().double() == middle  # all but the middles of subnormals below float32's
    codes = raw(fmt, fmt.encode(middle.float()[exact]))
    assert exact.float().mean() > 0.99 and not (codes & 1).any()
    rounded = fmt.round(middle.float())
    assert ((rounded == points[:-1]) | (rounded == points[1:])).all()


@pytest.mark.parametrize("name", SYMMETRIC)
@given(row=rows)
def test_round_is_symmetric(name, row):
    fmt = FORMATS.get(name)
    x = tensor(fmt, row)
    assert torch.equal(fmt.round(-x), -fmt.round(x))


@pytest.mark.parametrize("name", NAMES)
def test_grid_points_are_fixed(name):
    fmt = FORMATS.get(name)
    points = grid(fmt)
    assert points[0] == fmt.min and points[-1] == fmt.max and 0 in points
    assert torch.equal(fmt.round(points), points)
    huge = torch.finfo(torch.float32).max
    ends = fmt.round(torch.tensor([float("inf"), float("-inf"), huge, -huge]))
    assert ends.tolist() == [fmt.max, fmt.min, fmt.max, fmt.min]


@pytest.mark.parametrize("name", [f.name for f in FORMATS if f.bits < 8])
def test_zero_has_one_code(name):
    """-0 and values that round to it are packed like 0, so that equal tensors have equal bytes."""
    codes = FORMATS.get(name).encode(torch.tensor([0.0, -0.0, -1e-30, 1e-30]))
    assert (codes.view(torch.uint8) == codes[0].view(torch.uint8)).all()


@pytest.mark.parametrize("name", NAMES)
def test_exponent_and_divisor(name):
    """e_max is floor(log2 max) where there is one; absmax never makes a scale at which more than half a step clips."""
    fmt = FORMATS.get(name)
    if fmt.exponent is not None:
        assert 2.0**fmt.exponent <= fmt.max < 2.0 ** (fmt.exponent + 1)
    assert 0 < fmt.divisor <= fmt.max + 0.5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [0, 1, 2, 5, 16, 33])
def test_unpack_inverts_pack(name, width):
    fmt = FORMATS.get(name)
    codes = fmt.encode((torch.rand(3, width) * 2 - 1) * fmt.max)
    stored = fmt.pack(codes)
    assert stored.dtype == fmt.storage and stored.shape == (3, fmt.packed_width(width))
    back = fmt.unpack(stored, width)
    assert back.shape == (3, width)
    assert torch.equal(raw(fmt, back), raw(fmt, codes))
    assert torch.equal(fmt.unpack_values(stored, width), fmt.decode(codes))


@pytest.mark.parametrize("name", NAMES)
@given(cells=st.integers(0, 9), seed=st.integers(0, 1000))
def test_pack_and_unpack_are_inverse(name, cells, seed):
    """Every code survives, also those `encode` never makes; and every byte of whole cells does."""
    fmt, g = FORMATS.get(name), torch.Generator().manual_seed(seed)
    codes = every_code(fmt)[torch.randint(0, 2**fmt.bits, (2, cells * fmt.cell), generator=g)]
    stored = fmt.pack(codes)
    assert stored.numel() * stored.element_size() * 8 == codes.numel() * fmt.bits, "packing is dense"
    back = fmt.unpack(stored, codes.shape[1])
    assert torch.equal(raw(fmt, back), raw(fmt, codes))
    assert torch.equal(fmt.pack(back).view(torch.uint8), stored.view(torch.uint8))


def test_least_significant_bit_first():
    """Element 0 lies in the lowest bits of the first byte, codes straddle bytes: 3 bits in 3 bytes, 6 bits 4 in 3."""
    assert FORMATS.get("int3").pack(torch.arange(8, dtype=torch.uint8)).tolist() == [0x88, 0xC6, 0xFA]
    assert FORMATS.get("fp6_e3m2").pack(torch.tensor([1, 2, 3, 63], dtype=torch.uint8)).tolist() == [0x81, 0x30, 0xFC]
    assert FORMATS.get("uint2").pack(torch.tensor([1, 2, 3, 0, 1], dtype=torch.uint8)).tolist() == [0x39, 0x01]


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
    assert list(fmt.table) == fmt.decode(every_code(fmt)).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_encode_leaves_its_input_alone(name):
    x = torch.linspace(-3, 3, 50)
    before = x.clone()
    FORMATS.get(name).encode(x)
    FORMATS.get(name).round(x)
    assert torch.equal(x, before)
