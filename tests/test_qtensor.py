"""Quantization of tensors: properties over every format and named spec. A new one is covered by being registered."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dq.qtensor import QTensor, choose_scale, effective_scale, encode, fake_quantize, quantize
from dq.registry import DQError
from dq.spec import FORMATS, SCALE_DTYPES, SPECS, QuantSpec

WIDTHS = (1, 5, 16, 33, 100, 130)
SPEC_LIST = [named.spec for named in SPECS]
SPEC_LIST += [QuantSpec(f.name, s) for f in FORMATS for s in ("tensor", "channel")]
SPEC_LIST += [QuantSpec(f.name, "group", 16) for f in FORMATS]  # float32 scales
SPEC_LIST += [QuantSpec.parse(f"{f.name}/group64") for f in FORMATS]  # 16-bit scales
SPEC_LIST += [QuantSpec(f.name, "block", block_size=(2, 24)) for f in FORMATS]
SPEC_LIST += [QuantSpec("int4", "group", 32, scale_format=s) for s in SCALE_DTYPES]
every_spec = pytest.mark.parametrize("spec", SPEC_LIST, ids=lambda s: f"{s}-{s.scale_format}")
some = settings(max_examples=10)  # there are many specs

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


def grid(fmt) -> torch.Tensor:
    """Every value of a format within its range, sorted."""
    whole = torch.int16 if fmt.bits == 16 else torch.uint8
    values = fmt.decode(torch.arange(2**fmt.bits).to(whole).view(fmt.dtype))
    return values[torch.isfinite(values) & (values >= fmt.min) & (values <= fmt.max)].unique()


def symmetric(spec) -> bool:
    points = grid(spec.fmt)
    return torch.equal(points, -points.flip(0))


def per_row(spec) -> bool:
    """Whether a row's codes depend on that row alone."""
    shared = spec.strategy in ("tensor", "block") or spec.global_scale == "tensor"
    return spec.fmt.identity or not (shared or spec.scale_format == "int8_double")


def spread(t: torch.Tensor, q: QTensor) -> torch.Tensor:
    """One number per block -> one per element [rows, K], by repetition."""
    rows, columns = q.spec.block_size or (1, q.spec.columns)
    if columns:
        t = t.repeat_interleave(columns, 1)[:, : q.shape[1]].repeat_interleave(rows, 0)[: q.shape[0]]
    return t.expand(q.shape)


def steps(q: QTensor) -> torch.Tensor:
    """What one code step is worth, for every element [rows, K]."""
    step = effective_scale(q.scales, q.spec)
    return spread(step * q.global_scale if q.spec.global_scale else step, q)


def expected_values(x: torch.Tensor, q: QTensor) -> torch.Tensor:
    """The definition, element by element: `(clip(rne(x / step) + z) - z) * step`, or the cast of an identity."""
    if q.spec.fmt.identity:
        return q.spec.fmt.round(x)
    if q.zero_point is None:
        return q.spec.fmt.round(x / steps(q)) * steps(q)
    zero = spread(q.zero_point.float(), q)
    return (((x / steps(q)).round() + zero).clamp(0, q.spec.fmt.max) - zero) * steps(q)


@every_spec
@some
@given(x=matrices(ORDINARY + EXTREME))
def test_finite_in_finite_out(spec, x):
    q = quantize(x, spec)
    assert q.shape == tuple(x.shape) and q.dequantize().shape == x.shape
    assert torch.isfinite(q.dequantize()).all()
    scale = effective_scale(q.scales, spec)
    assert torch.isfinite(scale).all() and (scale > 0).all()
    assert not q.dequantize()[x == 0].any()


@every_spec
@some
@given(x=matrices(ORDINARY + EXTREME))
def test_bytes_and_shapes(spec, x):
    q = quantize(x, spec)
    rows, width = x.shape
    assert q.nbytes == spec.nbytes(rows, width)
    assert tuple(q.scale.shape) == spec.scale_shape(rows, width) and q.scale.dtype == spec.scale_dtype
    assert q.codes.dtype == spec.fmt.storage and q.codes.is_contiguous()
    assert tuple(q.codes.shape) == (rows, spec.fmt.packed_width(spec.padded_width(width)))
    assert (None if q.global_scale is None else tuple(q.global_scale.shape)) == spec.global_shape(rows, width)
    if spec.scale_format != "int8_double":
        shapes = {None: None, "tensor": (1,), "token": (rows, 1)}
        assert spec.global_shape(rows, width) == shapes[spec.global_scale]
    assert (q.zero_point is not None) == spec.fmt.unsigned
    if q.zero_point is not None:
        assert q.zero_point.shape == q.scale.shape and q.zero_point.dtype == torch.uint8


@every_spec
@some
@given(x=matrices(ORDINARY))
def test_values_are_code_times_step(spec, x):
    """x^ = round(x / step) * step: decode(encode(x)) is the rounded value, at the stored scales."""
    q = quantize(x, spec)
    assert torch.equal(q.dequantize(), expected_values(x, q))


@every_spec
@some
@given(x=matrices(ORDINARY))
def test_padding_is_zero(spec, x):
    """What lies behind a row in its last group decodes to 0; behind whole groups the bytes are 0."""
    q = quantize(x, spec)
    wide = QTensor(q.codes, q.scale, q.global_scale, spec, (x.shape[0], spec.padded_width(x.shape[1])), q.zero_point)
    if spec.columns and spec.padded_width(x.shape[1]) == spec.groups(x.shape[1]) * spec.columns:
        assert not wide.dequantize()[:, x.shape[1] :].any()
    elif spec.fmt.bits < 8:
        assert not spec.fmt.unpack(q.codes, spec.padded_width(x.shape[1]))[:, x.shape[1] :].any()


@every_spec
@some
@given(x=matrices(ORDINARY))
def test_idempotent_at_fixed_scale(spec, x):
    q = quantize(x, spec)
    again = encode(q.dequantize(), q.scales, spec)
    assert torch.equal(again.dequantize(), q.dequantize())


@every_spec
@some
@given(x=matrices(ORDINARY))
def test_error_is_bounded_by_the_largest_value(spec, x):
    """|x^ - x| <= half the widest gap of the grid, plus what rounding the scale costs at the top of the range."""
    x = x.clamp(min=0.0) if spec.fmt.positive else x
    q = quantize(x, spec)
    half_gap = float(grid(spec.fmt).diff().max()) / 2
    if spec.fmt.identity:
        assert ((q.dequantize() - x).abs() <= x.abs() * 2.0**-8 + 2.0**-25).all()
        return
    # Largest relative error of a stored scale; an E8M0 scale by the mode `floor` lets values up to 2^(e_max+1) clip.
    floor = 2.0 ** (math.frexp(spec.fmt.max)[1]) / spec.fmt.max - 1
    scale_error = {"fp32": 2.0**-23, "fp16": 2.0**-11, "bf16": 2.0**-8, "fp8_e4m3": 2.0**-4, "e8m0": floor}
    top = spec.fmt.max * steps(q)
    slack = top * (2 * scale_error.get(spec.scale_format, 0)) + 2.0**-9 * half_gap * (spec.scale_format == "fp8_e4m3")
    if spec.scale_format == "int8_double":  # a scale is off by up to one code of the second level
        slack = slack + spec.fmt.max * q.global_scale[:-1].max() if x.numel() else slack
    assert ((q.dequantize() - x).abs() <= half_gap * steps(q) * (1 + 1e-5) + slack).all()


@every_spec
@some
@given(x=matrices(ORDINARY + EXTREME))
def test_symmetric(spec, x):
    if symmetric(spec):
        assert torch.equal(quantize(-x, spec).dequantize(), -quantize(x, spec).dequantize())


@every_spec
@some
@given(x=matrices(ORDINARY + EXTREME))
def test_fake_is_quantize_and_dequantize(spec, x):
    """Bit for bit (the sign of a zero aside), for every leading shape where scales are per row."""
    expected = quantize(x, spec).dequantize()
    assert torch.equal(fake_quantize(x, spec), expected)
    if per_row(spec):
        assert torch.equal(fake_quantize(x[:, None, None], spec), expected[:, None, None])


@every_spec
@some
@given(x=matrices(ORDINARY + EXTREME, rows=(2, 5)))
def test_rows_do_not_see_each_other(spec, x):
    if per_row(spec):
        alone = torch.cat([quantize(row[None], spec).dequantize() for row in x])
        assert torch.equal(quantize(x, spec).dequantize(), alone)
        assert torch.equal(fake_quantize(x, spec), alone)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", FORMATS.names())
def test_every_width_and_group(name, width):
    """A last, shorter group has its own scale; its padding changes nothing."""
    x = torch.randn(3, width)
    for group in (1, 3, 16, 32, 64, 128):
        spec = QuantSpec(name, "group", group)
        q = quantize(x, spec)
        assert tuple(q.scale.shape) == ((0, 0) if spec.fmt.identity else (3, -(-width // group)))
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


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "text",
    [*(s.name for s in SPECS), "int4/token", "uint4/group32", "int4/group32/fp16", "nvfp4-token@4over6", "mxfp4@rceil"],
)
def test_no_grid_hides_what_is_not_finite(text, bad):
    """In codes a NaN would be a number: so the scale says it, of E8M0 by the code that OCP MX 1.0 gives to NaN."""
    spec, x = QuantSpec.parse(text), torch.randn(3, 128)
    x[1, 5] = bad
    q = encode(x, choose_scale(x, spec), spec)
    for out in (fake_quantize(x, spec), q.dequantize()):
        assert not torch.isfinite(out[1]).all()
    if spec.scale_format == "e8m0":
        assert (q.scale == 255).nonzero().tolist() == [[1, 0]] and out[1, :32].isnan().all()
        assert torch.isfinite(out[1, 32:]).all() and torch.isfinite(out[::2]).all()


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
