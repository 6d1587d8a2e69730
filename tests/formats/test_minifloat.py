"""E4M3, E2M1 and NVFP4 against worked examples: "item n" of the methods specification, section 4, and its V vectors."""

import pytest
import torch

from dq.qtensor import Scales, choose_scale, effective_scale, encode, quantize
from dq.spec import FORMATS, SPECS, QuantSpec

BLOCK8 = [0.12, -0.85, 2.4, 0.33, -1.1, 0.05, -0.47, 1.75]
BLOCK16 = [*BLOCK8, 0.9, -0.2, 0.61, -2.05, 0.28, 1.3, -0.66, 0.02]
# V2d: a second block, about 80 times smaller.
SMALL16 = [0.011, -0.02, 0.035, 0.004, -0.018, 0.027, 0.0, -0.031, 0.012, 0.022, -0.009, 0.015, -0.033, 0.006, 0.019]
SMALL16 = [*SMALL16, -0.025]

E4M3, E2M1 = FORMATS.get("fp8_e4m3"), FORMATS.get("fp4_e2m1")


def elements(q):
    """The code values [rows, K], before any scale."""
    return q.spec.fmt.unpack_values(q.codes, q.spec.padded_width(q.shape[1]))[:, : q.shape[1]]


def mse(q, x):
    return float((q.dequantize(torch.float64) - x.double()).square().mean())


@pytest.mark.parametrize(
    ("value", "rounded", "byte"),
    [(0.3, 0.3125, 0x2A), (500.0, 448.0, 0x7E), (0.40625, 0.40625, 0x2D), (0.625, 0.625, 0x32)],  # item 1
)
def test_e4m3_bytes(value, rounded, byte):
    code = E4M3.encode(torch.tensor([value]))
    assert code.view(torch.uint8).item() == byte
    assert E4M3.decode(code).item() == rounded


@pytest.mark.parametrize(
    ("scale_format", "amax", "stored"),
    [
        ("fp16", 7 / 3, 0.333251953125),  # item 1: 1/3 in float16 ...
        ("bf16", 7 / 3, 0.333984375),  # ... and in bfloat16
        ("bf16", 7 * 70000.0, 70144.0),
        ("fp16", 7 * 70000.0, 65504.0),  # item 1 has inf here; a stored scale must be finite (section 0): it saturates
    ],
)
def test_scale_encodings(scale_format, amax, stored):
    spec = QuantSpec("int4", "group", 4, scale_format=scale_format)
    assert quantize(torch.tensor([[amax, 0, 0, 0]]), spec).scale.item() == stored


def test_e4m3_range():
    """Section 1.2: max 448, min normal 2^-6, min subnormal 2^-9, saturation instead of NaN, NaN never produced."""
    x = torch.tensor([448.0, 464.0, 465.0, 1e30, -1e30, 2.0**-6, 2.0**-9, 2.0**-10, 1.1 * 2.0**-10, -(2.0**-11)])
    expected = [448.0, 448.0, 448.0, 448.0, -448.0, 2.0**-6, 2.0**-9, 0.0, 2.0**-9, 0.0]
    assert E4M3.decode(E4M3.encode(x)).tolist() == expected


def test_e4m3_steps():
    """Item 5, the element part: the block of 8 at the scale 2^-7."""
    x = torch.tensor([BLOCK8])
    q = encode(x, Scales(torch.full((1, 1), 2.0**-7)), QuantSpec("fp8_e4m3", "tensor"))
    assert elements(q)[0].tolist() == [15, -112, 320, 44, -144, 6.5, -60, 224]
    assert mse(q, x) == pytest.approx(1.431143e-3, rel=1e-5)


def test_fp8_row():
    """Item 15."""
    x = torch.tensor([[0.6, -45, 1.1, -0.8]])
    q = quantize(x, QuantSpec("fp8_e4m3", "token"))
    assert q.scale.item() == pytest.approx(0.10044643, rel=1e-6)
    assert elements(q)[0].tolist() == [6, -448, 11, -8]
    assert q.dequantize()[0].tolist() == pytest.approx([0.602679, -45, 1.104911, -0.803571], abs=1e-6)
    relative = ((q.dequantize() - x) / x).abs()[0, [0, 2, 3]]
    assert relative.tolist() == pytest.approx([0.00446] * 3, abs=1e-5)


def test_e2m1_table():
    """Section 1.2: magnitudes by code 0..7, the sign in bit 3; code 8 (-0) decodes to 0 and is never produced."""
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert E2M1.decode(torch.arange(16, dtype=torch.uint8)).tolist() == magnitudes + [-v for v in magnitudes]
    assert E2M1.encode(torch.tensor([-0.0, -0.1, -0.25, 0.0])).tolist() == [0, 0, 0, 0]


def test_e2m1_ties():
    """Section 1.2: a value on a decision bound goes to the even code, on both sides of zero."""
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    values = torch.tensor([0.0, 1, 1, 2, 2, 4, 4])
    assert torch.equal(E2M1.round(bounds), values) and torch.equal(E2M1.round(-bounds), -values)
    tiny = 1e-6
    assert E2M1.round(bounds + tiny).tolist() == [0.5, 1, 1.5, 2, 3, 4, 6]
    assert E2M1.round(bounds - tiny).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4]
    assert E2M1.round(torch.tensor([6.0, 7.0, 1e30, -1e30])).tolist() == [6, 6, 6, -6]


CODES16 = [1, 12, 7, 2, 13, 0, 10, 6, 4, 9, 3, 15, 1, 5, 11, 0]
VALUES16 = [0.5, -2, 6, 1, -3, 0, -1, 4, 2, -0.5, 1.5, -6, 0.5, 3, -1.5, 0]


def test_nvfp4_single_level():
    """Item 3, tensor scale 1: codes, bytes (low nibble first), error, and the extreme that grows by rounding."""
    x = torch.tensor([BLOCK16])
    q = quantize(x, QuantSpec.parse("nvfp4-single"))
    assert q.scale.dtype == torch.float8_e4m3fn and q.scale.float().tolist() == [[0.40625]]
    assert elements(q)[0].tolist() == VALUES16
    assert q.spec.fmt.unpack(q.codes, 16)[0].tolist() == CODES16
    assert bytes(q.codes[0].tolist()) == bytes.fromhex("C1 27 0D 6A 94 F3 51 0B")
    assert mse(q, x) == pytest.approx(0.014070239, rel=1e-6)
    assert q.dequantize()[0, 11].item() == -2.4375  # from -2.05


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-token"])
def test_nvfp4_two_levels(name):
    """Item 3: with its own second level the block scale is 448 and the effective step .4; the codes stay."""
    x = torch.tensor([BLOCK16])
    q = quantize(x, QuantSpec.parse(name))
    assert q.global_scale.item() == pytest.approx(0.000892857, rel=1e-6)
    assert q.scale.float().item() == 448
    assert q.spec.fmt.unpack(q.codes, 16)[0].tolist() == CODES16
    assert mse(q, x) == pytest.approx(0.01291875, rel=1e-5)


def test_nvfp4_small_block():
    """V2d: a small block beside a large one: scale 6.5 (6.5333 rounded) with a second level, subnormal without."""
    x = torch.tensor([BLOCK16 + SMALL16])
    q = quantize(x, QuantSpec.parse("nvfp4"))
    assert q.global_scale.item() == pytest.approx(8.928571e-4, rel=1e-6)
    assert q.scale.float().tolist() == [[448.0, 6.5]]
    assert elements(q)[0, 16:].tolist() == [2, -3, 6, 0.5, -3, 4, 0, -6, 2, 4, -1.5, 3, -6, 1, 3, -4]
    error = (q.dequantize() - x).square().unflatten(1, (2, 16)).mean(-1)[0]
    # The text says 2.6e-6 for the second block; its own script, and a sum by hand, give 3.387e-6.
    assert error.tolist() == pytest.approx([0.012919, 3.387e-6], rel=1e-3)
    single = quantize(x, QuantSpec.parse("nvfp4-single"))
    assert single.scale.float()[0].tolist() == pytest.approx([0.40625, 0.005859], rel=1e-4)
    error = (single.dequantize() - x).square().unflatten(1, (2, 16)).mean(-1)[0]
    assert error.tolist() == pytest.approx([0.014070, 3.479e-6], rel=1e-3)


def test_nvfp4_divides_by_the_rounded_scale():
    """V2e: block amax 2.5, element 1.44: scale .416667 -> .40625, value 4 (1.625), not 3 as by the unrounded scale."""
    x = torch.tensor([[2.5, 1.44] + [0.0] * 14])
    q = quantize(x, QuantSpec.parse("nvfp4-single"))
    assert q.scale.float().item() == 0.40625
    assert elements(q)[0, 1].item() == 4
    assert q.dequantize()[0, 1].item() == 1.625


@pytest.mark.parametrize(
    ("scale", "expected", "error"),
    [
        # Item 3, the "amax/4" candidate of four-over-six: the best of all E4M3 scales for this block.
        (0.625, [0, -1.5, 4, 0.5, -2, 0, -1, 3, 1.5, -0.5, 1, -3, 0.5, 2, -1, 0], 0.009194141),
        # Item 4, the MXFP4 scale 2^-1.
        (0.5, [0, -1.5, 4, 0.5, -2, 0, -1, 4, 2, -0.5, 1, -4, 0.5, 3, -1.5, 0], 0.02145),
    ],
)
def test_e2m1_at_given_scales(scale, expected, error):
    x = torch.tensor([BLOCK16])
    q = encode(x, Scales(torch.full((1, 1), scale)), QuantSpec("fp4_e2m1", "group", 16))
    assert elements(q)[0].tolist() == expected
    assert mse(q, x) == pytest.approx(error, rel=1e-5)


def test_zero_blocks_have_finite_scales():
    """Section 0: a block of zeros gets scale 2^-9 in E4M3, exponent 0 (2^-127) in E8M0 and 1 in float32, values 0."""
    x = torch.zeros(2, 32)
    for named in SPECS:
        q = quantize(x, named.spec)
        assert not q.dequantize().any()
        scale = effective_scale(q.scales, named.spec)
        assert torch.isfinite(scale).all() and (scale > 0).all()
        expected = {"fp8_e4m3": 2.0**-9, "e8m0": 2.0**-127, "fp32": 1.0}
        if named.spec.scale_format in expected:
            assert (scale == expected[named.spec.scale_format]).all()
        if named.spec.scale_format == "e8m0":
            assert not q.scale.any()
    assert quantize(x, QuantSpec("int8", "channel")).scale.tolist() == [[1.0], [1.0]]


def test_block_scales_are_clamped():
    """Section 1.5: block scales rest in [2^-9, 448]: far smaller blocks take the smallest scale, none takes 0."""
    x = torch.tensor([[1.0] * 16 + [1e-8] * 16, [1e4] * 16 + [1.0] * 16])
    scale = choose_scale(x, QuantSpec.parse("nvfp4-single")).scale
    assert scale.float()[0, 1].item() == 2.0**-9
    assert scale.float()[1, 0].item() == 448.0


def test_shared_second_level():
    """Section 1.5: fused linears (q/k/v) share one second level, so it must be able to cover more than one tensor."""
    x = torch.randn(8, 32)
    q = quantize(x, QuantSpec.parse("nvfp4"), amax=torch.tensor(20.0))
    assert q.global_scale.item() == pytest.approx(20 / (6 * 448), rel=1e-6)
    alone = quantize(x, QuantSpec.parse("nvfp4"))
    assert float((q.dequantize() - x).square().mean()) < 1.3 * float((alone.dequantize() - x).square().mean())
