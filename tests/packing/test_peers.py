"""Byte for byte against the packages that own a layout. Each test is skipped, visibly, where its package is missing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dq.packing import PACKINGS
from dq.packing.swizzle import swizzle, unswizzle

sizes = st.integers(1, 140)
seeds = st.integers(0, 2**31)


def random_codes(first, bits, shape, seed, dtype=torch.uint8):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(first, first + 2**bits, shape, generator=generator).to(dtype)


def helpers(path):
    """The module `path` of an optional package, or a visible skip."""
    return pytest.importorskip(path, reason=f"{path.split('.')[0]} is not installed: pip install -e .[dev]")


@pytest.mark.parametrize("bits", range(2, 9))
@given(rows=st.integers(1, 40), width=sizes, seed=seeds)
def test_compressed_tensors_words(bits, rows, width, seed):
    peer = helpers("compressed_tensors.compressors.pack_quantized.helpers")
    codes = random_codes(-(2 ** (bits - 1)), bits, (rows, width), seed, torch.int8)
    for name, axis in ((f"ct-int{bits}", 1), (f"ct-int{bits}-zeros", 0)):
        packing = PACKINGS.get(name)
        theirs = peer.pack_to_int32(codes, bits, packed_dim=axis)
        assert torch.equal(packing.pack(codes), theirs)
        assert torch.equal(packing.unpack(theirs, codes.shape), codes)
        assert torch.equal(peer.unpack_from_int32(packing.pack(codes), bits, codes.shape, packed_dim=axis), codes)


@given(rows=st.integers(1, 40), pairs=st.integers(1, 40), seed=seeds)
def test_compressed_tensors_fp4_bytes(rows, pairs, seed):
    peer = helpers("compressed_tensors.compressors.nvfp4.helpers")
    codes = random_codes(0, 4, (rows, 2 * pairs), seed)
    values = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])[codes.long()]
    assert torch.equal(PACKINGS.get("nibble-low").pack(codes), peer.pack_fp4_to_uint8(values))


@given(rows=st.integers(1, 300), cols=st.integers(1, 20), seed=seeds)
def test_torchao_blocked_scales(rows, cols, seed):
    peer = helpers("torchao.prototype.mx_formats.utils")
    scale = random_codes(0, 8, (rows, cols), seed)
    assert torch.equal(swizzle(scale), peer.to_blocked(scale))
    assert torch.equal(unswizzle(peer.to_blocked(scale), scale.shape), peer.from_blocked(swizzle(scale), rows, cols))


@given(rows=st.integers(1, 40), pairs=st.integers(1, 40), seed=seeds)
def test_torchao_nibbles(rows, pairs, seed):
    peer = helpers("torchao.prototype.mx_formats.kernels")
    codes = random_codes(0, 4, (rows, 2 * pairs), seed)
    stored = PACKINGS.get("nibble-low").pack(codes)
    assert torch.equal(stored, peer.pack_uint4(codes))
    assert torch.equal(peer.unpack_uint4(stored), codes)
