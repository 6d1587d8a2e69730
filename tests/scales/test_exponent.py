"""The exponent modes of the MX formats against their definitions in exact arithmetic (specification section 1.4)."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dq.qtensor import effective_scale, quantize
from dq.spec import SPECS, QuantSpec

MX = [n.name for n in SPECS if n.spec.scale_format == "e8m0"]
MODES = ("floor", "even", "ceil", "rceil", "best2")
TOP = torch.finfo(torch.float32).max
maxima = st.one_of(
    st.floats(2.0**-149, TOP, width=32),
    st.integers(-149, 127).map(lambda k: 2.0**k),
    st.sampled_from([TOP, 2.0**-149, 2.0**-126, 2.0**127, 1.75, 1.7499999, 6.0, 6.0000005, 448.0, 7.0, 3.5, 1.9375]),
)


def floor_log2(a: Fraction) -> int:
    k = a.numerator.bit_length() - a.denominator.bit_length()
    return k if Fraction(2) ** k <= a else k - 1


def ceil_log2(a: Fraction) -> int:
    k = floor_log2(a)
    return k if Fraction(2) ** k == a else k + 1


def clamp(k: int) -> int:
    return min(max(k, -127), 127)


def chosen(name: str, mode: str, *values: float) -> int:
    """The stored exponent of a block that holds these values."""
    x = torch.zeros(1, 32)
    x[0, : len(values)] = torch.tensor(values)
    return quantize(x, QuantSpec.parse(f"{name}@{mode}")).scale.item() - 127


@pytest.mark.parametrize("name", MX)
@given(a=maxima)
@example(a=1.0)
def test_modes_are_their_formulas(name, a):
    fmt = QuantSpec.parse(name).fmt
    exact, e_max = Fraction(a), math.frexp(fmt.max)[1] - 1
    assert chosen(name, "floor", a) == clamp(floor_log2(exact) - e_max)
    assert chosen(name, "ceil", -a) == clamp(ceil_log2(exact) - e_max)
    # a / max is computed in float32, as the tools do: held to that rounding.
    ratio = torch.tensor(a, dtype=torch.float32) / torch.tensor(fmt.max)
    assert chosen(name, "rceil", a) == (clamp(ceil_log2(Fraction(ratio.item()))) if ratio > 0 else -127)


@pytest.mark.parametrize(
    ("name", "bound"),
    [("mxfp4", 1.75), ("mxfp8", 1.9375), ("mxfp8-e5m2", 1.875), ("mxfp6", 1.875), ("mxfp6-e2m3", 1.9375)],
)
@given(a=st.floats(2.0**-100, 2.0**120, width=32))
def test_even_moves_up_where_the_maximum_rounds_up(name, bound, a):
    """E += 1 when the significand is at least 2 - half a unit of the element's last mantissa bit."""
    e_max, k = QuantSpec.parse(name).fmt.exponent, floor_log2(Fraction(a))
    for significand in (a / 2.0**k, bound, math.nextafter(bound, 0) - 2.0**-23, 1.0):
        got = chosen(name, "even", significand * 2.0**k)
        assert got == clamp(k + (significand >= bound) - e_max)


@pytest.mark.parametrize("name", MX)
@pytest.mark.parametrize("mode", MODES)
def test_zero_subnormal_and_huge(name, mode):
    """k is clamped to [-127, 127]; a block of zeros gets -127; what comes out is finite."""
    assert chosen(name, mode, 0.0) == -127
    assert chosen(name, mode, 2.0**-149) == -127
    # Within a factor of two of float32's largest number a value may round to 2^128.
    for a in (2.0**-149, 2.0**-127, TOP / 2, -TOP / 2):
        x = torch.full((1, 32), a)
        out = quantize(x, QuantSpec.parse(f"{name}@{mode}")).dequantize()
        assert torch.isfinite(out).all()
        if abs(a) > 1:
            assert (out / x >= 0.5).all()


@pytest.mark.parametrize("name", MX)
@pytest.mark.parametrize("mode", ["ceil", "rceil", "absmax"])
@given(a=st.floats(2.0**-100, 2.0**120, width=32))
def test_nothing_is_clipped(name, mode, a):
    """RCEIL never clips (and is the smallest that does not); an absmax scale in E8M0 is the same. CEIL clips what lies
    between max and 2^(e_max+1) just below a power of two only, never more than FLOOR."""
    fmt, k = QuantSpec.parse(name).fmt, chosen(name, mode, a)
    if mode == "ceil":
        assert k in (chosen(name, "floor", a), chosen(name, "floor", a) + 1)
        return
    slack = 1 + 2.0**-23
    assert a <= fmt.max * 2.0**k * slack
    assert k == -127 or a * slack > fmt.max * 2.0 ** (k - 1)


@pytest.mark.parametrize("name", MX)
@pytest.mark.parametrize("mode", MODES)
def test_scaling_by_two_moves_the_exponent(name, mode):
    x = torch.randn(16, 64)
    a, b = (quantize(x * f, QuantSpec.parse(f"{name}@{mode}")) for f in (1.0, 2.0**20))
    assert torch.equal(a.scale.int() + 20, b.scale.int())
    assert torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8))


@pytest.mark.parametrize("name", MX)
def test_best2_is_the_better_of_two(name):
    x = torch.randn(64, 64) * torch.rand(64, 1) * 10
    outs = {m: quantize(x, QuantSpec.parse(f"{name}@{m}")) for m in ("best2", "rceil")}
    error = {m: (q.dequantize() - x).square().unflatten(1, (-1, 32)).sum(-1) for m, q in outs.items()}
    offset = outs["rceil"].scale.int() - outs["best2"].scale.int()
    assert set(offset.unique().tolist()) <= {0, 1}
    assert (error["best2"] <= error["rceil"] * (1 + 1e-6)).all()


def test_even_as_compressed_tensors():
    """Its MXFP8 uses the constant of E2M1: 1.75 instead of 1.9375."""
    x = torch.full((1, 32), 1.8)
    own, other = (QuantSpec.parse("mxfp8@even").with_(profile=p) for p in ("dq", "compressed-tensors"))
    assert effective_scale(quantize(x, own).scales, own).item() == 2.0**-8
    assert effective_scale(quantize(x, other).scales, other).item() == 2.0**-7
