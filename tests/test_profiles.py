"""Profiles of tools that are not installed here, from worked examples ("item n": the methods specification, section 4)
and formulas; tests/interop has those of installed tools."""

import pytest
import torch

from dq.profiles import PROFILES, convention
from dq.qtensor import quantize
from dq.registry import DQError
from dq.spec import QuantSpec

BLOCK16 = [0.12, -0.85, 2.4, 0.33, -1.1, 0.05, -0.47, 1.75, 0.9, -0.2, 0.61, -2.05, 0.28, 1.3, -0.66, 0.02]
ROW8 = [0.52, -1.37, 2.1, -0.08, 0.95, -2.8, 1.63, 0.31]


def run(values, text, profile, **changes):
    return quantize(torch.tensor([values]), QuantSpec.parse(text).with_(profile=profile, **changes))


def codes(q):
    return q.spec.fmt.decode(q.spec.fmt.unpack(q.codes, q.shape[1])).to(torch.int64).flatten().tolist()


@pytest.mark.parametrize("profile", ["dq", "modelopt", "torchao"])
def test_nvfp4_block(profile):
    """Item 3, two levels: global .000892857, block 448."""
    q = run(BLOCK16, "nvfp4", profile)
    assert q.global_scale.item() == pytest.approx(0.000892857, abs=1e-9) and q.scale.item() == 448.0
    assert bytes(q.codes.flatten().tolist()) == bytes.fromhex("C1 27 0D 6A 94 F3 51 0B")
    assert float((q.dequantize() - torch.tensor(BLOCK16)).square().mean()) == pytest.approx(0.01291875, abs=1e-7)


def test_inverse_second_level():
    """compressed-tensors: the same bytes, the second level inverted."""
    ours, theirs = run(BLOCK16, "nvfp4", "dq"), run(BLOCK16, "nvfp4", "compressed-tensors")
    assert torch.equal(ours.codes, theirs.codes) and torch.equal(ours.scale.float(), theirs.scale.float())
    assert theirs.global_scale.item() == pytest.approx(1120.0) and ours.global_scale.item() == pytest.approx(1 / 1120)
    torch.testing.assert_close(theirs.dequantize(), ours.dequantize())


@pytest.mark.parametrize(
    ("profile", "zero", "small"),
    [
        ("dq", 2.0**-9, 2.0**-9),
        ("modelopt", 1.0, 2.0**-9),
        ("torchao", 2.0**-6, 2.0**-6),
        ("compressed-tensors", 0.125, 0.125),
    ],
)
def test_block_scale_of_zeros(profile, zero, small):
    """Section 0: the scales that tools store for blocks of zeros, and of almost zero beside a large one."""
    q = run([6.0] * 16 + [0.0] * 16 + [1e-9] * 16, "nvfp4", profile)
    assert q.scale.tolist() == [[448.0, zero, small]]
    assert not q.codes[:, 8:].any()


def test_modelopt_formula():
    """block = E4M3(max(amax_b / (6 global), 2^-9)), x / (block * global), the sign of what is below 0."""
    x = torch.randn(16, 96) * torch.logspace(-6, 6, 16)[:, None]
    x[3], x[4, :16] = 0, -0.0
    q = quantize(x, QuantSpec.parse("nvfp4").with_(profile="modelopt"))
    unit = x.abs().amax() / torch.tensor(2688.0)
    blocks = x.unflatten(1, (-1, 16))
    scale = blocks.abs().amax(-1) / (6.0 * unit)
    scale = torch.where(scale == 0, 1.0, scale).clamp(min=2.0**-9).to(torch.float8_e4m3fn)
    scaled = blocks / (scale.float() * unit)[..., None]
    bounds, ties_up = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]), torch.tensor([0.75, 1.75, 3.5])
    magnitude = torch.bucketize(scaled.abs(), bounds) + torch.isin(scaled.abs(), ties_up)
    expected = (magnitude + 8 * (scaled < 0)).flatten(1).to(torch.uint8)
    assert q.global_scale.item() == unit.item() and torch.equal(q.scale.float(), scale.float())
    assert torch.equal(q.spec.fmt.unpack(q.codes, 96), expected)


@pytest.mark.parametrize("profile", ["dq", "gptq", "awq"])
def test_asymmetric_example(profile):
    """Item 6: GPTQ and AWQ compute it alike."""
    q = run(ROW8, "uint4/channel", profile)
    assert q.scale.item() == pytest.approx(0.3266667, abs=1e-7) and q.zero_point.item() == 9
    assert codes(q) == [11, 5, 15, 9, 12, 0, 14, 10]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_zero_row(bits):
    """A row of zeros counts as -1..1; symmetric codes are stored with the zero point 2^(b-1)."""
    n = 2**bits - 1
    q = run([0.0] * 8, f"uint{bits}/channel", "gptq")
    assert q.scale.item() == pytest.approx(2 / n) and q.zero_point.item() == 2 ** (bits - 1)
    assert codes(q) == [2 ** (bits - 1)] * 8 and not q.dequantize().any()
    symmetric = run([0.0] * 8, f"int{bits}_full/channel", "gptq")
    assert symmetric.scale.item() == pytest.approx(2 / n) and not symmetric.codes.any()


def test_gptq_symmetric():
    """Scale 2 amax / 15, codes round(x / scale) + 8 in 0..15; these are the codes that item 10 packs."""
    q = run([3.0, -2.0, 7.0, -7.5, -5.0, 1.0, 4.0, -1.0], "int4_full/channel", "gptq")
    assert q.scale.item() == 1.0
    assert [c + 8 for c in codes(q)] == [11, 6, 15, 0, 3, 9, 12, 7]


@pytest.mark.parametrize(("s", "out"), [(1.0, -1.932), (1.5, -2.678667), (2.0, -3.052), (3.0, -3.12), (4.0, -2.773333)])
def test_awq_example(s, out):
    """Item 11: INT3 with codes -4..3 and amax / 3; the salient weight is scaled by s and its input by 1 / s."""
    w, x = torch.tensor([0.84, -0.4, 0.47, -0.61]), torch.tensor([0.5, 8.0, 0.4, 0.6])
    scaled = w * torch.tensor([1.0, s, 1.0, 1.0])
    q = run(scaled.tolist(), "int3_wide/channel", "awq")
    y = q.dequantize()[0] / torch.tensor([1.0, s, 1.0, 1.0]) @ x
    assert y.item() == pytest.approx(out, abs=1e-5)


def test_awq_ranges():
    """The range is at least 1e-5 and is not widened to contain 0."""
    zeros, narrow = run([0.0] * 8, "uint4/channel", "awq"), run([1.0, 2.0, 1.5, 1.25], "uint4/channel", "awq")
    assert zeros.scale.item() == pytest.approx(1e-5 / 15) and zeros.zero_point.item() == 0
    assert narrow.scale.item() == pytest.approx(1 / 15) and narrow.zero_point.item() == 0
    assert codes(narrow) == [15, 15, 15, 15]  # 1 / scale is 15 already: an offset below 0 is not stored
    assert run([0.0] * 8, "int4_wide/channel", "awq").scale.item() == pytest.approx(1e-5 / 7)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(
    "text", ["nvfp4", "nvfp4@sweep", "mxfp4@even", "int4/group32", "uint4/channel", "fp8_e4m3/token"]
)
def test_every_profile_takes_every_grid(profile, text):
    """Finite numbers near the input, whatever the convention."""
    x = torch.randn(6, 64)
    x[2] = 0
    q = quantize(x, QuantSpec.parse(text).with_(profile=profile))
    error = (q.dequantize() - x).square().mean()
    assert torch.isfinite(q.dequantize()).all() and error < 0.03


def test_unknown_profile():
    with pytest.raises(DQError, match=r"unknown profile 'torcha'.*torchao"):
        convention(QuantSpec.parse("nvfp4").with_(profile="torcha"))
