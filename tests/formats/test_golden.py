"""NF4, MX, four-over-six, asymmetric and 3-bit grids against worked examples of the methods specification.

"item n" is section 4 there, "V..." a vector of the specification of diffusion methods.
"""

import pytest
import torch

from dq.qtensor import Scales, choose_scale, effective_scale, encode, fake_quantize, quantize
from dq.spec import FORMATS, QuantSpec

BLOCK8 = [0.12, -0.85, 2.4, 0.33, -1.1, 0.05, -0.47, 1.75]
BLOCK16 = [*BLOCK8, 0.9, -0.2, 0.61, -2.05, 0.28, 1.3, -0.66, 0.02]
MIXED = [0.52, -1.37, 2.1, -0.08, 0.95, -2.8, 1.63, 0.31]
GELU = [0, 0.3, 1.2, 2.5, 0.8, 3.1, 0.05, 1.7]


def codes(q):
    return q.spec.fmt.unpack(q.codes, q.shape[1])[0].tolist()


def elements(q):
    """The code values [K] of the first row, before any scale."""
    return q.spec.fmt.unpack_values(q.codes, q.spec.padded_width(q.shape[1]))[0, : q.shape[1]].tolist()


def scale_of(q):
    return effective_scale(q.scales, q.spec).flatten()[0].item()


def mse(q, x):
    return float((q.dequantize(torch.float64) - x.double()).square().mean())


def test_16_bit_casts():
    """Item 1: 1/3 in FP16 and BF16, an error ratio of 8; 70000 is beyond FP16, which saturates here (section 0)."""
    x = torch.tensor([[1 / 3, 70000.0]])
    half, brain = (quantize(x, QuantSpec(name)).dequantize()[0].tolist() for name in ("fp16", "bf16"))
    assert half == [0.333251953125, 65504.0] and brain == [0.333984375, 70144.0]
    assert abs(brain[0] - 1 / 3) / abs(half[0] - 1 / 3) == pytest.approx(8.0, rel=1e-3)


def test_nf4():
    """Item 2; section 5.1 corrects -.444 to -.443456."""
    x = torch.tensor([BLOCK8])
    q = quantize(x, QuantSpec.parse("nf4"))
    assert q.scale.item() == pytest.approx(2.4)
    assert codes(q) == [8, 3, 15, 9, 3, 7, 5, 14]
    values = [0.190993, -0.947802, 2.4, 0.386232, -0.947802, 0, -0.443456, 1.735096]
    assert q.dequantize()[0].tolist() == pytest.approx(values, abs=1e-6)
    assert mse(q, x) == pytest.approx(0.005544777, rel=1e-5)
    assert bytes(q.codes[0, :4].tolist()) == bytes.fromhex("38 9F 73 E5")  # the first element in the low nibble


def test_nf4_double():
    """Section 1.3: scales around their mean in blocks of 256; off by at most half a code of the second level."""
    x = torch.randn(64, 64 * 40) * torch.rand(64, 1)
    single, double = quantize(x, QuantSpec.parse("nf4")), quantize(x, QuantSpec.parse("nf4-double"))
    second, mean = double.global_scale[:-1], double.global_scale[-1]
    assert len(second) == 64 * 40 // 256 and mean == pytest.approx(float(single.scale.mean()), rel=1e-5)
    off = (effective_scale(double.scales, double.spec) - single.scale).abs().flatten().unflatten(0, (-1, 256))
    assert (off <= second[:, None] * 0.5001).all()
    assert mse(double, x) < 1.01 * mse(single, x)


def test_nf4_double_with_dead_groups():
    """A group of zeros does not pull the mean and the range of the other scales."""
    x = torch.randn(16, 64 * 16) * 0.01
    whole = mse(quantize(x, QuantSpec.parse("nf4-double")), x)
    x[3], x[5, :128] = 0, 0
    assert mse(quantize(x, QuantSpec.parse("nf4-double")), x) < 1.05 * whole


@pytest.mark.parametrize("rule", ["4over6", "sweep"])
def test_four_over_six(rule):
    """Item 3: scale .625 puts the maximum on 4: the optimum over all E4M3 scales."""
    x = torch.tensor([BLOCK16])
    q = quantize(x, QuantSpec.parse(f"nvfp4-single@{rule}"))
    assert scale_of(q) == 0.625
    assert elements(q) == [0, -1.5, 4, 0.5, -2, 0, -1, 3, 1.5, -0.5, 1, -3, 0.5, 2, -1, 0]
    assert mse(q, x) == pytest.approx(0.009194141, rel=1e-5)


def test_four_over_six_second_level():
    """Section 1.5: the second level is amax / (6 * 256), so that the larger scale, 384, still fits E4M3."""
    q = quantize(torch.tensor([BLOCK16]), QuantSpec.parse("nvfp4@4over6"))
    assert q.global_scale.item() == pytest.approx(2.4 / (6 * 256), rel=1e-6)
    assert scale_of(q) == 384


@pytest.mark.parametrize("rule", ["floor", "rceil", "even"])
def test_mxfp4(rule):
    """Item 4: three modes agree on 2^-1; 2.4 becomes 2."""
    x = torch.tensor([BLOCK16])
    q = quantize(x, QuantSpec.parse(f"mxfp4@{rule}"))
    assert q.scale.dtype == torch.uint8 and q.scale.item() == 126 and scale_of(q) == 0.5
    assert elements(q) == [0, -1.5, 4, 0.5, -2, 0, -1, 4, 2, -0.5, 1, -4, 0.5, 3, -1.5, 0]
    assert mse(q, x) == pytest.approx(0.02145, rel=1e-5)
    assert q.dequantize()[0, 2] == 2.0


def test_mxfp4_other_modes():
    """Item 4 by hand: 2.4 is no power of two, so CEIL is one above FLOOR; 4/3 (scale 2/3) is no E8M0 scale."""
    x = torch.tensor([BLOCK16])
    assert scale_of(quantize(x, QuantSpec.parse("mxfp4@ceil"))) == 1.0
    best = quantize(x, QuantSpec.parse("mxfp4@best2"))
    errors = {k: mse(encode(x, Scales(torch.tensor([[127 + k]], dtype=torch.uint8)), best.spec), x) for k in (-2, -1)}
    assert best.scale.item() - 127 == min(errors, key=errors.get)
    q = encode(x, Scales(torch.full((1, 1), 2 / 3)), QuantSpec("fp4_e2m1", "group", 16))
    assert mse(q, x) == pytest.approx(0.014974306, rel=1e-5)


def test_mxint8_and_mxfp8():
    """Item 5: the same 8 values; MXINT8 codes carry an implied 2^-6."""
    x = torch.tensor([BLOCK8])
    q = quantize(x, QuantSpec.parse("mxint8"))
    assert scale_of(q) == 2.0
    assert q.codes[0, :8].tolist() == [4, -27, 77, 11, -35, 2, -15, 56]
    assert mse(q, x) == pytest.approx(6.11328e-5, rel=1e-4)
    q = quantize(x, QuantSpec.parse("mxfp8"))
    assert scale_of(q) == 2.0**-7
    assert elements(q) == [15, -112, 320, 44, -144, 6.5, -60, 224]
    assert mse(q, x) == pytest.approx(1.431143e-3, rel=1e-5)


@pytest.mark.parametrize(
    ("values", "scale", "zero", "expected", "error"),
    [
        (MIXED, 0.3266667, 9, [11, 5, 15, 9, 12, 0, 14, 10], 0.008572222),
        (GELU, 0.2066667, 0, [0, 1, 6, 12, 4, 15, 0, 8], 0.0020125),
    ],
)
def test_asymmetric_int4(values, scale, zero, expected, error):
    """Item 6."""
    x = torch.tensor([values])
    q = quantize(x, QuantSpec("uint4", "channel"))
    assert q.scale.item() == pytest.approx(scale, rel=1e-6)
    assert q.zero_point.item() == zero and codes(q) == expected
    assert mse(q, x) == pytest.approx(error, rel=1e-5)


def test_asymmetric_against_symmetric():
    """Item 6: 24.8 % less error on mixed signs, 4.757 times less behind a GELU; -2.8 comes out as -2.94."""
    gain = []
    for values in (MIXED, GELU):
        x = torch.tensor([values])
        gain.append(
            mse(quantize(x, QuantSpec("int4", "channel")), x) / mse(quantize(x, QuantSpec("uint4", "channel")), x)
        )
    assert 1 - 1 / gain[0] == pytest.approx(0.248, abs=5e-4) and gain[1] == pytest.approx(4.757, rel=1e-3)
    assert quantize(torch.tensor([MIXED]), QuantSpec("uint4", "channel")).dequantize()[0, 5] == pytest.approx(-2.94)


def test_zero_point_is_added_after_rounding():
    """Section 1.1: `rne(x/s) + z`; rounding x/s + z at once moves ties where z is odd: 2.5 -> 2 + 1, not 4."""
    spec = QuantSpec("uint4", "channel")
    scales = Scales(torch.ones(1, 1), None, torch.ones(1, 1, dtype=torch.uint8))
    assert codes(encode(torch.tensor([[2.5, -0.5, 14.5, -7.0]]), scales, spec)) == [3, 1, 15, 0]


def test_awq_int3():
    """Item 11: one group, codes -4..3, step amax/3; scaling up the second weight until its step is not its own."""
    w, x = torch.tensor([[0.84, -0.4, 0.47, -0.61]]), torch.tensor([0.5, 8, 0.4, 0.6])
    assert float(w @ x) == pytest.approx(-2.958, abs=1e-6)
    for s, out in ((1, -1.932), (1.5, -2.678667), (2, -3.052), (3, -3.12), (4, -2.773333)):
        factor = torch.tensor([1.0, s, 1.0, 1.0])
        q = quantize(w * factor, QuantSpec("int3_wide", "channel"))
        assert float((q.dequantize() / factor) @ x) == pytest.approx(out, abs=2e-6)
    q = quantize(w * torch.tensor([1.0, 4.0, 1.0, 1.0]), QuantSpec("int3_wide", "channel"))
    assert q.scale.item() == pytest.approx(0.533333, rel=1e-5)
    assert FORMATS.get("int3_wide").round(torch.tensor([-9.0])).item() == -4


def test_split_inputs():
    """V4: one scale over both halves of a concatenated input drowns the small half; k_segments gives each its own."""
    deep, skip = [0.4, -0.3, 0.6, -0.5, 0.2, -0.6], [9, -7.5, 6.2, -11, 4.1, 10.5]
    x = torch.tensor([deep + skip])
    for name, joint, split in (("int8", 6.48e-4, 1.86e-6), ("int4", 0.21, 6.12e-4)):
        for spec, error in ((QuantSpec(name, "token"), joint), (QuantSpec(name, "token", k_segments=(6, 6)), split)):
            out = fake_quantize(x, spec)[0, :6]
            assert float((out - x[0, :6]).square().mean()) == pytest.approx(error, rel=2e-3)
    q = quantize(x, QuantSpec("int4", "token"))
    assert elements(q) == [0, 0, 0, 0, 0, 0, 6, -5, 4, -7, 3, 7]


def test_branches_with_scales_of_their_own():
    """V6 of the guidance section: asymmetric INT8, a row beside a wide one: .0098 shared, .00235 alone."""
    rows = torch.tensor([[0.9, -1.4, 0.3], [0.2, 0.1, -7.0]])
    shared = quantize(rows.reshape(1, -1), QuantSpec("uint8", "channel")).dequantize().reshape(2, 3)
    alone = quantize(rows, QuantSpec("uint8", "token")).dequantize()
    assert float((shared - rows)[0].abs().max()) == pytest.approx(0.009803921, rel=1e-3)
    assert float((alone - rows)[0].abs().max()) == pytest.approx(0.002352941, rel=1e-3)


def test_w8a8_product():
    """Item 9: integer accumulators and the output of a W8A8 linear."""
    x, w = torch.tensor([[0.8, -1.2, 0.5], [2, 0.4, -0.6]]), torch.tensor([[0.3, -0.7, 1.1], [-0.5, 0.9, 0.2]])
    qx, qw = quantize(x, QuantSpec("int8", "token")), quantize(w, QuantSpec("int8", "channel"))
    assert qw.codes.tolist() == [[35, -81, 127], [-71, 127, 28]]
    assert qx.codes.tolist() == [[85, -127, 53], [127, 25, -38]]
    assert (qx.codes.int() @ qw.codes.int().T).tolist() == [[19993, -20680], [-2406, -6906]]
    y = qx.dequantize() @ qw.dequantize().T
    assert y.flatten().tolist() == pytest.approx([1.63623, -1.384736, -0.328179, -0.770711], abs=1e-5)
    assert float((y - x @ w.T).abs().max()) == pytest.approx(0.011821, abs=1e-5)


def test_full_range_scale():
    """Section 1.1: compressed-tensors divides by 7.5 and 127.5 and clamps to -8..7, -128..127."""
    x = torch.tensor([[-1.5, 1.5, 0.2]])
    q = quantize(x, QuantSpec("int4_full", "channel"))
    assert q.scale.item() == pytest.approx(0.2) and elements(q) == [-8, 7, 1]
    q = quantize(x * 85, QuantSpec("int8_full", "channel"))
    assert q.scale.item() == pytest.approx(1.0) and elements(q) == [-128, 127, 17]


def test_uint_range_contains_zero():
    """Section 1.1: the range is widened to contain 0, so that 0 stays 0: positive rows get z = 0, negative z = n."""
    x = torch.tensor([[3.0, 4.0, 4.5], [-3.0, -4.0, -4.5], [0.0, 0.0, 0.0]])
    scales = choose_scale(x, QuantSpec("uint4", "channel"))
    assert scales.zero_point.flatten().tolist() == [0, 15, 0]
    assert scales.scale.flatten().tolist() == pytest.approx([0.3, 0.3, 1.0])
