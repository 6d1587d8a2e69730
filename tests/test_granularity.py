"""What shares a scale: segments against their pieces, tiles against a slow loop, odd shapes, static scales."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dq.granularity import from_blocks, pieces, to_blocks
from dq.qtensor import choose_scale, encode, fake_quantize, quantize
from dq.registry import DQError
from dq.spec import FORMATS, SPECS, QuantSpec

SHAPES = [(0, 8), (1, 1), (1, 33), (3, 5), (5, 16), (7, 50), (9, 130)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_format = pytest.mark.parametrize("name", [f.name for f in FORMATS if not f.identity])


def raw(q):
    return q.codes.contiguous().view(torch.uint8)


@every_format
@pytest.mark.parametrize("strategy", ["tensor", "channel", "token"])
@settings(max_examples=5)
@given(parts=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_k_segments_are_pieces(name, strategy, parts, seed):
    """A concatenated input with scales of its own per part is each part by itself."""
    x = torch.randn(4, sum(parts), generator=torch.Generator().manual_seed(seed))
    spec = QuantSpec(name, strategy, k_segments=tuple(parts))
    alone = [quantize(p, QuantSpec(name, strategy)) for p in x.split(parts, 1)]
    q = quantize(x, spec)
    assert torch.equal(q.dequantize(), torch.cat([a.dequantize() for a in alone], 1))
    assert torch.equal(q.scale, torch.cat([a.scale for a in alone], 1))
    assert torch.equal(fake_quantize(x, spec), q.dequantize()) and q.nbytes == spec.nbytes(*x.shape)


@pytest.mark.parametrize(
    "text", ["int8/tensor", "uint4/tensor", "fp8_e4m3/tensor", "nvfp4", "nvfp4@sweep", "nvfp4-token"]
)
@settings(max_examples=10)
@given(parts=st.lists(st.integers(1, 5), min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_row_segments_are_pieces(text, parts, seed):
    """Fused linears (q, k, v in one weight) each keep the scale, or the second level, that they would have alone."""
    x = torch.randn(sum(parts), 48, generator=torch.Generator().manual_seed(seed)) * 10.0
    spec = QuantSpec.parse(text)
    fused = quantize(x, spec.with_(row_segments=tuple(parts)))
    alone = [quantize(p, spec) for p in x.split(parts)]
    assert torch.equal(fused.dequantize(), torch.cat([a.dequantize() for a in alone]))
    assert torch.equal(raw(fused), torch.cat([raw(a) for a in alone]))
    assert fused.nbytes == fused.spec.nbytes(*x.shape)
    if spec.global_scale == "tensor":
        assert tuple(fused.global_scale.shape) == (len(parts), 1)


def test_both_segments():
    x = torch.randn(6, 10)
    spec = QuantSpec("int4", "tensor", row_segments=(2, 4), k_segments=(3, 7))
    q = quantize(x, spec)
    assert tuple(q.scale.shape) == (2, 2)
    rows = []
    for part in x.split((2, 4)):
        rows.append(torch.cat([quantize(p, QuantSpec("int4")).dequantize() for p in part.split((3, 7), 1)], 1))
    assert torch.equal(q.dequantize(), torch.cat(rows))
    assert torch.equal(encode(x, q.scales, spec).codes, q.codes)


@pytest.mark.parametrize("segments", [dict(row_segments=(2, 3)), dict(k_segments=(5, 5))])
def test_segments_must_add_up(segments):
    with pytest.raises(DQError, match="do not add up to"):
        quantize(torch.randn(4, 9), QuantSpec("int8", "tensor", **segments))


def test_fused_tiles_are_refused():
    with pytest.raises(DQError, match="row_segments do not go with 2-D blocks"):
        quantize(torch.randn(4, 8), QuantSpec("int8", "block", block_size=(2, 2), row_segments=(2, 2)))


def slow_tiles(x, name, high, wide):
    """The definition: every tile by itself, edge tiles smaller."""
    out = torch.empty_like(x)
    for i in range(0, x.shape[0], high):
        for j in range(0, x.shape[1], wide):
            tile = x[i : i + high, j : j + wide]
            out[i : i + high, j : j + wide] = (
                quantize(tile.reshape(1, -1), QuantSpec(name)).dequantize().reshape_as(tile)
            )
    return out


@every_format
@every_shape
def test_tiles_against_a_loop(name, shape):
    x = torch.randn(shape)
    for high, wide in ((1, 4), (2, 3), (4, 16), (128, 128)):
        spec = QuantSpec(name, "block", block_size=(high, wide))
        q = quantize(x, spec)
        assert tuple(q.scale.shape) == (-(-shape[0] // high), -(-shape[1] // wide))
        assert torch.equal(q.dequantize(), slow_tiles(x, name, high, wide))
        assert torch.equal(fake_quantize(x, spec), q.dequantize())


def test_deepseek_fp8():
    """Weights in 128 x 128 tiles, activations 1 x 128; both E4M3, amax on 448 (specification section 1.6)."""
    w, x = torch.randn(200, 300), torch.randn(5, 300)
    q = quantize(w, QuantSpec.parse("fp8-block"))
    assert tuple(q.scale.shape) == (2, 3)
    assert q.scale[1, 2] * 448 == pytest.approx(float(w[128:, 256:].abs().max()), rel=1e-6)
    scale = quantize(x, QuantSpec.parse("fp8-block-token")).scale
    assert scale[3, 2].item() * 448 == pytest.approx(float(x[3, 256:].abs().max()), rel=1e-6)
    rounded_up = quantize(w, QuantSpec("fp8_e4m3", "block", block_size=(128, 128), scale_format="e8m0"))
    exponents = torch.log2(q.scale).ceil()
    assert torch.equal(rounded_up.scale.float() - 127, exponents)  # UE8M0: the power of two above


@pytest.mark.parametrize("named", [n.name for n in SPECS])
@every_shape
def test_blocks_are_a_view_of_the_tensor(named, shape):
    """`from_blocks` undoes `to_blocks`, for whole and for ragged blocks."""
    spec, x = QuantSpec.parse(named), torch.randn(shape)
    for r, c, i, j in pieces(spec, *shape):
        blocks = to_blocks(x[r, c], spec)
        scales = choose_scale(x, spec).scale
        assert tuple(blocks.shape[:2]) == tuple(scales[i, j].shape)
        back = from_blocks(blocks, spec, *x[r, c].shape)
        assert torch.equal(back[:, : shape[1]], x[r, c])
        assert not back[:, shape[1] :].any()


ACTIVATIONS = [
    "int8/token",
    "uint4/token",
    "fp8_e4m3/token",
    "nvfp4-token",
    "mxfp4",
    "mxint8",
    "fp8-block-token",
    "bf16/token",
]


@pytest.mark.parametrize("text", ACTIVATIONS)
@pytest.mark.parametrize(
    "shape", [(48,), (3, 48), (2, 3, 50), (2, 1, 3, 33), (2, 2, 1, 3, 16), (0, 48), (2, 0, 16), (2, 3, 1)]
)
def test_one_to_five_dimensions(text, shape):
    """The last axis is quantized, all others are rows; an empty batch stays empty; strides do not matter."""
    spec, x = QuantSpec.parse(text), torch.randn(shape)
    out = fake_quantize(x, spec)
    assert out.shape == x.shape and out.dtype == torch.float32 and torch.isfinite(out).all()
    flat = x.reshape(-1, shape[-1])
    assert torch.equal(out.reshape(flat.shape), quantize(flat, spec).dequantize())
    wide = torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
    assert torch.equal(fake_quantize(wide, spec), fake_quantize(wide.contiguous(), spec))


@pytest.mark.parametrize("text", ["int8/tensor", "fp8_e4m3/tensor", "int4/tensor"])
def test_static_scales(text):
    """A scale from calibration is used as it is: larger values saturate, and no row depends on another."""
    spec = QuantSpec.parse(text)
    scales = choose_scale(torch.linspace(-2, 2, 101)[None], spec)
    assert float(scales.scale) == pytest.approx(2 / spec.fmt.max, rel=1e-6)
    x = torch.cat([torch.randn(3, 16), torch.full((1, 16), 50.0)])
    out = encode(x, scales, spec).dequantize()
    assert torch.allclose(out[3], torch.full((16,), 2.0))
    assert torch.equal(encode(x[:3], scales, spec).dequantize(), out[:3])


def test_double_quantized_scales_of_any_number():
    """255, 256 and 257 scales: one, one and two second-level scales, and the mean."""
    for groups, seconds in ((255, 1), (256, 1), (257, 2)):
        x = torch.randn(1, 64 * groups)
        q = quantize(x, QuantSpec.parse("nf4-double"))
        assert tuple(q.global_scale.shape) == (seconds + 1,)
        assert torch.isfinite(q.dequantize()).all()
