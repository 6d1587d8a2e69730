"""Quantization of tensors: properties over every format and named spec. A new one is covered by being registered."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dq.qtensor import QTensor, effective_scale, encode, fake_quantize, quantize
from dq.registry import DQError
from dq.spec import FORMATS, SPECS, QuantSpec

WIDTHS = (1, 5, 16, 33, 100, 130)
GROUPS = (16, 32, 64, 128)
SPEC_LIST = [named.spec for named in SPECS]
SPEC_LIST += [QuantSpec(f.name, s) for f in FORMATS for s in ("tensor", "channel", "token")]
SPEC_LIST += [QuantSpec.parse(f"{f.name}/group{g}") for f in FORMATS for g in GROUPS]
SPEC_LIST += [QuantSpec(f.name, "group", 16) for f in FORMATS]  # float32 scales
every_spec = pytest.mark.parametrize("spec", SPEC_LIST, ids=lambda s: f"{s}-{s.scale_format}")

ORDINARY = ("normal", "outlier", "zeros", "zero row", "zero block", "few")
EXTREME = ("subnormal", "1e-30", "1e30", "all exponents")


def make(kind: str, rows: int, width: int, seed: int) -> torch.Tensor:
    """A float32 matrix of one of the kinds above."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=g)
    if kind == "outlier" and x.numel():
        x.view(-1)[seed % x.numel()] *= 200
    elif kind == "zeros":
        x.zero_()
    elif kind == "zero row":
        x[::2] = 0
    elif kind == "zero block":
        x[:, : width // 2] = 0
    elif kind == "few":
        x = x.sign() * torch.randint(0, 3, x.shape, generator=g)
    elif kind == "all exponents":
        x *= 10.0 ** (60 * torch.rand(rows, width, generator=g) - 30)
    elif kind in EXTREME:
        x *= {"subnormal": 1e-40, "1e-30": 1e-30, "1e30": 1e30}[kind]
    return x


def matrices(kinds, rows=(0, 1, 2, 5)):
    one = st.sampled_from
    return st.builds(make, one(kinds), one(rows), one(WIDTHS), st.integers(0, 10_000))


def symmetric(spec) -> bool:
    return spec.symmetric and spec.fmt.min == -spec.fmt.max


def per_row(spec) -> bool:
    """Whether a row's codes depend on that row alone."""
    return spec.strategy != "tensor" and spec.global_scale != "tensor"


def steps(q: QTensor) -> torch.Tensor:
    """What one code step is worth, for every element [rows, K]."""
    step = effective_scale(q.scale, q.global_scale)
    if q.spec.group_size:
        step = step.repeat_interleave(q.spec.group_size, 1)[:, : q.shape[1]]
    return step.expand(q.shape)


@every_spec
@given(x=matrices(ORDINARY + EXTREME))
def test_finite_in_finite_out(spec, x):
    q = quantize(x, spec)
    assert q.shape == tuple(x.shape) and q.dequantize().shape == x.shape
    assert torch.isfinite(q.dequantize()).all()
    assert torch.isfinite(q.scale.float()).all() and (q.scale.float() > 0).all()
    assert not q.dequantize()[x == 0].any()


@every_spec
@given(x=matrices(ORDINARY + EXTREME))
def test_bytes_and_shapes(spec, x):
    q = quantize(x, spec)
    rows, width = x.shape
    assert q.nbytes == spec.nbytes(rows, width)
    assert tuple(q.scale.shape) == spec.scale_shape(rows, width) and q.scale.dtype == spec.scale_dtype
    assert q.codes.dtype == spec.fmt.storage and q.codes.is_contiguous()
    assert tuple(q.codes.shape) == (rows, spec.fmt.packed_width(spec.padded_width(width)))
    shapes = {None: None, "tensor": (1,), "token": (rows, 1)}
    assert (None if q.global_scale is None else tuple(q.global_scale.shape)) == shapes[spec.global_scale]


@every_spec
@given(x=matrices(ORDINARY))
def test_values_are_code_times_step(spec, x):
    """x^ = round(x / step) * step: decode(encode(x)) is the rounded value, at the stored scales."""
    q = quantize(x, spec)
    expected = spec.fmt.round(x / steps(q)) * steps(q)
    assert torch.equal(q.dequantize(), expected)
    padding = spec.fmt.unpack_values(q.codes, spec.padded_width(x.shape[1]))[:, x.shape[1] :]
    assert not padding.any()


@every_spec
@given(x=matrices(ORDINARY))
def test_idempotent_at_fixed_scale(spec, x):
    q = quantize(x, spec)
    again = encode(q.dequantize(), q.scale, q.global_scale, spec)
    assert torch.equal(again.dequantize(), q.dequantize())


@every_spec
@given(x=matrices(ORDINARY))
def test_error_is_bounded_by_the_largest_value(spec, x):
    """|x^ - x| <= half the widest gap of the grid, plus what rounding the scale costs at the top of the range."""
    q = quantize(x, spec)
    table = torch.arange(2**spec.fmt.bits, dtype=torch.uint8).view(spec.fmt.dtype)
    grid = spec.fmt.decode(table)
    grid = grid[torch.isfinite(grid) & (grid.abs() <= spec.fmt.max)].unique()
    half_gap = float(grid.diff().max()) / 2
    scale_error = {"fp32": 2.0**-23, "fp16": 2.0**-11, "bf16": 2.0**-8, "fp8_e4m3": 2.0**-4}[spec.scale_format]
    top = spec.fmt.max * steps(q)
    slack = top * (2 * scale_error) + 2.0**-9 * half_gap * (spec.scale_format == "fp8_e4m3")
    assert ((q.dequantize() - x).abs() <= half_gap * steps(q) * (1 + 1e-5) + slack).all()


@every_spec
@given(x=matrices(ORDINARY + EXTREME))
def test_symmetric(spec, x):
    if symmetric(spec):
        assert torch.equal(quantize(-x, spec).dequantize(), -quantize(x, spec).dequantize())


@every_spec
@given(x=matrices(ORDINARY + EXTREME))
def test_fake_is_quantize_and_dequantize(spec, x):
    """Bit for bit (the sign of a zero aside), for every leading shape where scales are per row."""
    expected = quantize(x, spec).dequantize()
    assert torch.equal(fake_quantize(x, spec), expected)
    if per_row(spec):
        assert torch.equal(fake_quantize(x[:, None, None], spec), expected[:, None, None])


@every_spec
@given(x=matrices(ORDINARY + EXTREME, rows=(2, 5)))
def test_rows_do_not_see_each_other(spec, x):
    if per_row(spec):
        alone = torch.cat([quantize(row[None], spec).dequantize() for row in x])
        assert torch.equal(quantize(x, spec).dequantize(), alone)
        assert torch.equal(fake_quantize(x, spec), alone)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("group", [1, 3, *GROUPS])
@pytest.mark.parametrize("name", FORMATS.names())
def test_every_width_and_group(name, group, width):
    """A last, shorter group has its own scale; its padding changes nothing."""
    x, spec = torch.randn(3, width), QuantSpec(name, "group", group)
    q = quantize(x, spec)
    assert q.scale.shape == (3, -(-width // group))
    parts = [quantize(p, QuantSpec(name, "channel")).dequantize() for p in x.split(group, 1)]
    assert torch.equal(q.dequantize(), torch.cat(parts, 1))


@every_spec
def test_any_memory_layout(spec):
    x = torch.randn(66, 40)
    for view in (x.T, x[::3, 1:34], x.flip(0), x.T[:, ::2]):
        before = view.clone()
        q, plain = quantize(view, spec), quantize(before.contiguous(), spec)
        assert torch.equal(q.codes.view(torch.uint8), plain.codes.view(torch.uint8))
        assert torch.equal(q.scale.float(), plain.scale.float())
        assert torch.equal(view, before), "the input was changed"


@every_spec
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_arithmetic_is_float32(spec, dtype):
    x = torch.randn(4, 48).to(dtype)
    q, wide = quantize(x, spec), quantize(x.float(), spec)
    assert torch.equal(q.codes.view(torch.uint8), wide.codes.view(torch.uint8))
    assert q.dequantize().dtype == torch.float32 and q.dequantize(dtype).dtype == dtype


@every_spec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_are_refused_by_name(spec, bad):
    x = torch.randn(3, 20)
    x[1, 7] = bad
    with pytest.raises(DQError, match=r"blocks\.3\.to_q\.weight holds 1 NaN or Inf"):
        quantize(x, spec, name="blocks.3.to_q.weight")


@pytest.mark.parametrize("shape", [(4,), (2, 3, 4)])
def test_only_matrices(shape):
    with pytest.raises(DQError, match="2-D"):
        quantize(torch.zeros(shape), QuantSpec("int8", "channel"))


def test_nan_propagates_through_fake():
    """Activations are not checked on the hot path: a NaN must come out as NaN, not as a plausible number."""
    x = torch.randn(2, 16)
    x[0, 3] = float("nan")
    out = fake_quantize(x, QuantSpec("int8", "token"))
    assert out[0].isnan().any() and torch.isfinite(out[1]).all()


def test_more_bits_lose_less():
    x = torch.randn(64, 256)
    specs = ("int4/channel", "int4/group64", "nvfp4", "int8/channel")
    errors = [float((quantize(x, QuantSpec.parse(s)).dequantize() - x).square().mean()) for s in specs]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        # Synthetic Gauss column of the relative-error table (specification section 1.5), in 1e-3.
        ("nvfp4", 9.02),
        ("int4/group16", 7.33),
        ("int4/group128", 13.95),
    ],
)
def test_gaussian_error_matches_the_published_table(spec, expected):
    x = torch.randn(512, 128, generator=torch.Generator().manual_seed(1))
    error = (quantize(x, QuantSpec.parse(spec)).dequantize() - x).square().sum() / x.square().sum()
    assert float(error) * 1e3 == pytest.approx(expected, rel=0.03)
