"""Hand-made words and slow loops: the place of each bit, from the formulas and not from dq's own code."""

import pytest
import torch

from dq.packing import PACKINGS
from dq.packing.swizzle import swizzle, unswizzle
from dq.registry import DQError

CODES = torch.tensor([11, 6, 15, 0, 3, 9, 12, 7])


def pack(name, codes):
    return PACKINGS.get(name).pack(torch.as_tensor(codes))


def word(stored):
    """The one int32 of `stored` as an unsigned number."""
    return int(stored.reshape(())) % 2**32


def test_eight_nibbles_in_a_word():
    assert word(pack("gptq-int4", CODES[None])) == 0x7C930F6B  # [N=1, K=8] -> [1, 1]
    assert word(pack("gptq_v2-int4-zeros", CODES[:, None])) == 0x7C930F6B  # [N=8, groups=1] -> [1, 1]
    assert word(pack("gptq-int4-zeros", CODES[:, None] + 1)) == 0x7C930F6B
    assert word(pack("ct-int4", CODES[None] - 8)) == 0x7C930F6B
    assert word(pack("ct-int4-zeros", CODES[:, None] - 8)) == 0x7C930F6B
    assert word(pack("awq-int4", CODES[:, None])) == 0x7906C3FB


def test_compressed_tensors_word_of_a_symmetric_int4_row():
    """x = [.52, -1.37, 2.1, -.08, .95, -2.8, 1.63, .31] at scale .4."""
    assert word(pack("ct-int4", [[1, -3, 5, 0, 2, -7, 4, 1]])) == 0x9C1A8D59


def test_bytes_of_an_nvfp4_block():
    codes = torch.tensor([1, 12, 7, 2, 13, 0, 10, 6, 4, 9, 3, 15, 1, 5, 11, 0])
    assert pack("nibble-low", codes).tolist() == list(bytes.fromhex("C1270D6A94F3510B"))
    assert pack("nibble-high", codes).tolist() == list(bytes.fromhex("1C72D0A6493F15B0"))
    assert pack("bnb-nf4", codes).flatten().tolist() == list(bytes.fromhex("1C72D0A6493F15B0"))
    assert pack("nibble-low", codes[:3]).tolist() == [0xC1, 0x07]  # the last byte of an odd row is half empty
    assert pack("nibble-high", codes[:3]).tolist() == [0x1C, 0x70]


def test_signed_nibbles_are_twos_complement():
    assert pack("nibble-s4", [[0, 1, 7, -1, -8, -7, -2]]).tolist() == [[0x10, 0xF7, 0x98, 0x0E]]


def test_bitsandbytes_rows_run_on():
    """Three rows of three codes share bytes: the layout flattens first."""
    stored = pack("bnb-nf4", [[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    assert stored.shape == (5, 1) and stored.flatten().tolist() == [0x12, 0x34, 0x56, 0x78, 0x90]


def test_two_bit_codes_fill_a_byte_from_below():
    assert pack("bytes-2", [[1, 2, 3, 0, 3]]).tolist() == [[0b00_11_10_01, 0b11]]


def test_four_six_bit_codes_fill_three_bytes_from_below():
    a, b, c, d = 0b100001, 0b110010, 0b000111, 0b101011
    wanted = [0b10_100001, 0b0111_1100, 0b101011_00]
    assert pack("bytes-6", [[a, b, c, d]]).tolist() == [wanted]
    assert pack("bytes-6", [[a, b, c, d, a]]).tolist() == [[*wanted, a]]


@pytest.mark.parametrize("name", ["gptq-int3", "gptq_v2-int3-zeros"])
def test_three_bit_codes_straddle_words(name):
    """Code 10 has two bits in word 0 and one in word 1; code 21 one bit in word 1 and two in word 2."""

    def words(place, code):
        codes = torch.zeros(1, 32, dtype=torch.uint8)
        codes[0, place] = code
        stored = pack(name, codes if name == "gptq-int3" else codes.T)
        return [v % 2**32 for v in stored.flatten().tolist()]

    assert words(0, 0b101) == [0b101, 0, 0]
    assert words(9, 0b101) == [0b101 << 27, 0, 0]
    assert words(10, 0b111) == [0b11 << 30, 0b1, 0]
    assert words(10, 0b100) == [0, 0b1, 0]
    assert words(11, 0b101) == [0, 0b101 << 1, 0]
    assert words(20, 0b101) == [0, 0b101 << 28, 0]
    assert words(21, 0b111) == [0, 0b1 << 31, 0b11]
    assert words(21, 0b110) == [0, 0, 0b11]
    assert words(22, 0b101) == [0, 0, 0b101 << 2]
    assert words(31, 0b101) == [0, 0, 0b101 << 29]


@pytest.mark.parametrize("name", [n for n in PACKINGS.names() if n.startswith(("ct-", "gptq"))])
def test_words_against_one_long_integer(name):
    """Python's own integers hold a whole row: bit i*b and up is code i."""
    packing = PACKINGS.get(name)
    rows, width = 5, 37
    generator = torch.Generator().manual_seed(7)
    codes = torch.randint(packing.first, packing.first + 2**packing.bits, (rows, width), generator=generator)
    stored = packing.pack(codes)
    along_n = name.endswith("zeros")
    lines = codes.T if along_n else codes
    # K first for GPTQ, N first for compressed-tensors; words along N for zero points.
    words_first = (name.startswith("gptq")) != along_n
    packed = stored.T if words_first else stored
    assert packed.shape == (len(lines), -(-lines.shape[1] * packing.bits // 32))
    for line, row in zip(lines.tolist(), packed.tolist(), strict=True):
        wanted = sum((code - packing.first) << (packing.bits * i) for i, code in enumerate(line))
        assert sum((v % 2**32) << (32 * j) for j, v in enumerate(row)) == wanted


def test_awq_against_a_slow_loop():
    codes = torch.randint(0, 16, (24, 5), generator=torch.Generator().manual_seed(3))
    stored = pack("awq-int4", codes)
    assert stored.shape == (5, 3)
    for k in range(5):
        for j in range(3):
            for i, column in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
                assert int(stored[k, j]) >> (4 * i) & 0xF == codes[8 * j + column, k]


def test_a_zero_point_of_0_does_not_fit_the_first_gptq_format():
    """z - 1 would borrow from the other zero points of the word."""
    with pytest.raises(DQError, match="holds codes from 1 to 16, got 0"):
        pack("gptq-int4-zeros", [[0]])
    assert word(pack("gptq-int4-zeros", torch.full((8, 1), 8))) == 0x77777777
    assert word(pack("gptq_v2-int4-zeros", torch.full((8, 1), 8))) == 0x88888888


@pytest.mark.parametrize("rows, cols", [(1, 1), (128, 4), (129, 5), (200, 11), (300, 8)])
def test_swizzle_against_the_formula(rows, cols):
    scale = torch.randint(1, 256, (rows, cols), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    wanted = torch.zeros(-(-rows // 128) * 128 * -(-cols // 4) * 4, dtype=torch.uint8)
    for r in range(rows):
        for c in range(cols):
            tile = (r // 128) * -(-cols // 4) + c // 4
            wanted[tile * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4] = scale[r, c]
    assert torch.equal(swizzle(scale), wanted)
    assert torch.equal(pack("comfy-nvfp4-scale", scale).flatten(), wanted)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e8m0fnu])
def test_swizzle_moves_bytes_of_every_scale_dtype(dtype):
    """NaN codes too: nothing is converted on the way."""
    scale = torch.arange(256, dtype=torch.uint8).reshape(32, 8).view(dtype)
    for name in ("swizzle-128x4", "comfy-nvfp4-scale"):
        packing = PACKINGS.get(name)
        stored = packing.pack(scale)
        assert stored.dtype == dtype
        assert torch.equal(packing.unpack(stored, (32, 8)).view(torch.uint8), scale.view(torch.uint8))


def test_swizzle_refuses_what_is_no_matrix_of_bytes():
    with pytest.raises(DQError, match="one byte"):
        swizzle(torch.ones(4, 4))
    with pytest.raises(DQError, match=r"\[\.\.\., R, C\]"):
        swizzle(torch.ones(4, dtype=torch.uint8))
    with pytest.raises(DQError, match=r"must be torch.uint8 \[512\], got torch.uint8 \[511\]"):
        unswizzle(torch.zeros(511, dtype=torch.uint8), (4, 4))


def test_comfy_pads_weights_to_16_in_both_directions():
    stored = pack("comfy-nvfp4", torch.full((17, 20), 15))
    assert stored.shape == (32, 16)
    assert (stored[:17, :10] == 0xFF).all() and stored.count_nonzero() == 17 * 10


def test_words_need_two_axes():
    with pytest.raises(DQError, match="at least 2 axes"):
        pack("ct-int4", [1, 2, 3])
