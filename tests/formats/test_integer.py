"""INT8 and INT4 against worked examples. Numbers are those of the methods specification, section 4 ("item n")."""

import pytest
import torch

from dq.qtensor import Scales, encode, quantize
from dq.spec import FORMATS, QuantSpec

BLOCK8 = [0.12, -0.85, 2.4, 0.33, -1.1, 0.05, -0.47, 1.75]
BLOCK16 = [*BLOCK8, 0.9, -0.2, 0.61, -2.05, 0.28, 1.3, -0.66, 0.02]
MIXED = [0.52, -1.37, 2.1, -0.08, 0.95, -2.8, 1.63, 0.31]


def codes(q):
    """Signed codes as nested lists, whatever the packing."""
    values = q.spec.fmt.unpack_values(q.codes, q.spec.padded_width(q.shape[1]))
    return values[:, : q.shape[1]].to(torch.int32).tolist()


def mse(q, x):
    return float((q.dequantize(torch.float64) - x.double()).square().mean())


@pytest.mark.parametrize(
    ("values", "scale", "expected", "error"),
    [
        (BLOCK8, 0.342857, [0, -2, 7, 1, -3, 0, -1, 5], 0.008324745),  # item 2
        (BLOCK16, 0.342857, [0, -2, 7, 1, -3, 0, -1, 5, 3, -1, 2, -6, 1, 4, -2, 0], 0.007464668),  # item 4
        (MIXED, 0.4, [1, -3, 5, 0, 2, -7, 4, 1], 0.0114),  # item 6
        ([0, 0.3, 1.2, 2.5, 0.8, 3.1, 0.05, 1.7], 0.442857, [0, 1, 3, 6, 2, 7, 0, 4], 0.009572704),  # item 6, GELU
    ],
)
def test_int4_rows(values, scale, expected, error):
    x = torch.tensor([values])
    q = quantize(x, QuantSpec("int4", "channel"))
    assert codes(q) == [expected]
    assert float(q.scale) == pytest.approx(scale, rel=2e-6)
    assert mse(q, x) == pytest.approx(error, rel=1e-5)


def test_int8_row():
    """Item 6: 8 bits instead of 4 divide the step by 18.14 and the squared error by 460.14."""
    x = torch.tensor([MIXED])
    q8, q4 = (quantize(x, QuantSpec(name, "channel")) for name in ("int8", "int4"))
    assert codes(q8) == [[24, -62, 95, -4, 43, -127, 74, 14]]
    assert float(q8.scale) == pytest.approx(0.0220472, rel=2e-6)
    assert mse(q8, x) == pytest.approx(2.477525e-5, rel=1e-4)
    assert mse(q4, x) / mse(q8, x) == pytest.approx(460.14, rel=1e-4)
    assert float(q4.scale / q8.scale) == pytest.approx(18.14, rel=1e-3)


GELU = [-0.17, -0.05, 0.0, 0.4, 1.3, 2.2, -0.12, 3.0]


def test_shifted_unsigned_row():
    """V2c: moved above 0 by 0.171875, the values after a GELU use all 16 codes: a third of the squared error."""
    x = torch.tensor([GELU])
    signed, q = quantize(x, QuantSpec("int4", "token")), quantize(x + 0.171875, QuantSpec("uint4_positive", "token"))
    assert float(signed.scale) == pytest.approx(0.428571, rel=2e-6)
    assert mse(signed, x) == pytest.approx(0.006260714, rel=1e-5)
    assert codes(q) == [[0, 1, 1, 3, 7, 11, 0, 15]] and q.zero_point is None
    assert float(q.scale) == pytest.approx(0.211458, rel=2e-6)
    assert mse(q, x + 0.171875) == pytest.approx(0.002295367, rel=1e-5)
    group = QuantSpec.parse("uint4-positive-token")
    assert quantize(x + 0.171875, group).codes.tolist()[0][:4] == [0x10, 0x31, 0xB7, 0xF0]


def test_positive_grids_lose_what_is_negative():
    x = torch.tensor([[-1.0, -0.001, 2.0, 3.0]])
    for name in ("uint4_positive", "uint8_positive"):
        q = quantize(x, QuantSpec(name, "token"))
        assert q.dequantize()[0, :2].tolist() == [0, 0] and q.dequantize()[0, 3] == 3


def test_per_tensor_loses_the_small_row():
    """Item 7: one scale for both rows zeroes the first one; a scale per channel keeps it."""
    w = torch.tensor([[0.1, -0.2, 0.15, 0.05], [3, -2.4, 1.8, 2.7]])
    one, two = quantize(w, QuantSpec("int4", "tensor")), quantize(w, QuantSpec("int4", "channel"))
    assert float(one.scale) == pytest.approx(0.428571, rel=2e-6)
    assert codes(one)[0] == [0, 0, 0, 0]
    assert float((one.dequantize() - w)[0].square().mean()) == pytest.approx(0.01875, rel=1e-5)
    assert mse(one, w) == pytest.approx(0.016033163, rel=1e-5)
    assert codes(two) == [[4, -7, 5, 2], [7, -6, 4, 6]]
    assert float((two.dequantize() - w)[0].square().mean()) == pytest.approx(7.65306e-5, rel=1e-5)
    assert mse(two, w) == pytest.approx(0.006696429, rel=1e-5)


def test_range_scale_saturates():
    """Item 8: at s = 4/255 the code of +2 would be 127.5, which rounds to 128 and is clamped to 127."""
    s = torch.full((1, 1), 4 / 255)
    q = encode(torch.tensor([[1.5, -0.5, 2.0]]), Scales(s), QuantSpec("int8", "tensor"))
    assert codes(q) == [[96, -32, 127]]
    assert q.dequantize()[0, 0] == pytest.approx(1.505882, abs=1e-6)


def test_per_token():
    """Item 12: an outlier channel sets the scale of every token; without it the error falls by 7."""
    x = torch.tensor([[0.5, -1.1, 8.3, 0.7], [-0.9, 0.4, -7.6, 1.2]])
    q = quantize(x, QuantSpec("int8", "token"))
    assert q.scale.flatten().tolist() == pytest.approx([0.0653543, 0.0598425], rel=2e-6)
    assert codes(q)[0] == [8, -17, 127, 11]
    assert float((q.dequantize() - x).abs().max()) == pytest.approx(0.0228346, rel=1e-4)
    rest = x[:, [0, 1, 3]]
    q = quantize(rest, QuantSpec("int8", "token"))
    assert q.scale.flatten().tolist() == pytest.approx([0.00866142, 0.00944882], rel=2e-6)
    assert codes(q) == [[58, -127, 81], [-95, 42, 127]]
    assert float((q.dequantize() - rest).abs().max()) == pytest.approx(0.0031496, rel=1e-4)


def test_fp8_row_in_int8():
    """Item 15, the INT8 side: the row whose E4M3 error is 0.446 % loses up to 18.1 %."""
    x = torch.tensor([[0.6, -45, 1.1, -0.8]])
    q = quantize(x, QuantSpec("int8", "token"))
    assert codes(q) == [[2, -127, 3, -2]]
    assert q.dequantize()[0].tolist() == pytest.approx([0.708661, -45, 1.062992, -0.708661], abs=1e-6)
    relative = ((q.dequantize() - x) / x).abs()[0]
    assert relative.tolist() == pytest.approx([0.181, 0, 0.034, 0.114], abs=5e-4)


def _word(stored):
    """Four bytes as one little-endian uint32."""
    return int.from_bytes(bytes(stored.flatten().tolist()), "little")


def test_nibble_order():
    """Item 10: element 0 rests in the lowest nibble of the little-endian word."""
    stored = FORMATS.get("int4").pack(torch.tensor([[11, 6, 15, 0, 3, 9, 12, 7]], dtype=torch.uint8))
    assert stored.dtype == torch.uint8 and stored.shape == (1, 4)
    assert _word(stored) == 0x7C930F6B


def test_offset_words_of_compressed_tensors():
    """Item 6: compressed-tensors stores code + 8; two's complement nibbles differ from that in the top bit only."""
    q = quantize(torch.tensor([MIXED]), QuantSpec("int4", "channel"))
    assert _word(q.codes) ^ 0x88888888 == 0x9C1A8D59


def test_ties_go_to_even():
    """Section 0 of the specification: round half to even, and the most negative code is never produced."""
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 6.5, -6.5])
    assert FORMATS.get("int4").round(x).tolist() == [0, 2, 2, 0, -2, -2, 6, -6]
    low = torch.tensor([-1e9, -8.0, -7.6])
    assert FORMATS.get("int4").round(low).tolist() == [-7, -7, -7]
    assert FORMATS.get("int8").round(torch.tensor([-128.0, -1e9, 127.5])).tolist() == [-127, -127, 127]


def test_foreign_codes_decode():
    """-8 and -128 are legal on decode: other tools write them."""
    int4 = FORMATS.get("int4")
    assert int4.decode(torch.tensor([-8, 8, 15, -1], dtype=torch.int8)).tolist() == [-8, -8, -1, -1]
    assert int4.unpack_values(torch.tensor([0x78, 0xF9], dtype=torch.uint8), 4).tolist() == [-8, 7, -7, -1]
    assert FORMATS.get("int8").decode(torch.tensor([-128], dtype=torch.int8)).tolist() == [-128]
