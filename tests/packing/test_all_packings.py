"""What every registered layout must do. A new layout is covered by being registered; nothing here names one."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dq.packing import PACKINGS
from dq.registry import DQError

NAMES = PACKINGS.names()
# Around bytes, words, tiles of 16 and 128: odd, even, empty.
sizes = st.one_of(st.integers(0, 40), st.sampled_from([63, 64, 65, 127, 128, 129, 257]))
seeds = st.integers(0, 2**31)


def codes_of(packing, shape, seed=0):
    """Random codes over the whole range of the layout, both ends included, in the dtype that `unpack` gives."""
    generator = torch.Generator().manual_seed(seed)
    last = packing.first + 2**packing.bits - 1
    codes = torch.randint(packing.first, last + 1, shape, generator=generator)
    if codes.numel() > 1:
        codes.view(-1)[0], codes.view(-1)[-1] = packing.first, last
    return codes.to(torch.int16 if packing.first > 0 else torch.int8 if packing.first < 0 else torch.uint8)


def assert_same(got, wanted):
    assert got.dtype == wanted.dtype and got.is_contiguous()
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", NAMES)
@given(rows=sizes, width=sizes, seed=seeds)
@example(rows=0, width=0, seed=0)
@example(rows=0, width=5, seed=0)
@example(rows=5, width=0, seed=0)
@example(rows=1, width=1, seed=0)
def test_unpack_inverts_pack(name, rows, width, seed):
    packing = PACKINGS.get(name)
    codes = codes_of(packing, (rows, width), seed)
    stored = packing.pack(codes)
    assert stored.is_contiguous()
    assert_same(packing.unpack(stored, codes.shape), codes)


@pytest.mark.parametrize("name", NAMES)
@given(rows=st.integers(1, 20), width=st.integers(1, 40), seed=seeds)
def test_pack_reads_any_strides_and_writes_the_same_bytes(name, rows, width, seed):
    packing = PACKINGS.get(name)
    codes = codes_of(packing, (rows, width), seed)
    stored = packing.pack(codes)
    strided = codes.T.contiguous().T
    before = strided.clone()
    assert_same(packing.pack(strided), stored)
    assert torch.equal(strided, before)  # the caller's tensor stays as it was
    apart = torch.stack([stored, stored], dim=-1)[..., 0]
    assert_same(packing.unpack(apart, codes.shape), codes)


@pytest.mark.parametrize("name", NAMES)
@given(seed=seeds)
def test_pack_inverts_unpack(name, seed):
    """A file without padding is reproduced: no bit of it is lost."""
    packing = PACKINGS.get(name)
    shape = (128, 64)  # no layout pads this
    like = packing.pack(codes_of(packing, shape))
    generator = torch.Generator().manual_seed(seed)
    stored = torch.randint(0, 256, (like.numel() * like.element_size(),), generator=generator, dtype=torch.uint8)
    stored = stored.view(like.dtype).reshape(like.shape)
    assert stored.numel() * stored.element_size() * 8 == 128 * 64 * packing.bits
    assert_same(packing.pack(packing.unpack(stored, shape)), stored)


@pytest.mark.parametrize("name", NAMES)
def test_leading_axes_are_batches(name):
    packing = PACKINGS.get(name)
    codes = codes_of(packing, (2, 3, 7, 9))
    stored = packing.pack(codes)
    assert_same(packing.unpack(stored, codes.shape), codes)
    if stored.shape[:2] == (2, 3):  # or the layout flattens all axes
        assert_same(stored[1, 2].contiguous(), packing.pack(codes[1, 2]))


@pytest.mark.parametrize("name", NAMES)
def test_codes_out_of_range_are_refused(name):
    packing = PACKINGS.get(name)
    for wrong in (packing.first - 1, packing.first + 2**packing.bits):
        codes = torch.full((4, 9), packing.first, dtype=torch.int32)
        codes[3, 8] = wrong
        with pytest.raises(DQError, match=r"holds codes from|one byte"):
            packing.pack(codes)
    with pytest.raises(DQError, match=r"integer codes|one byte"):
        packing.pack(torch.zeros(4, 9))


@pytest.mark.parametrize("name", NAMES)
def test_a_stored_tensor_of_another_shape_is_refused(name):
    packing = PACKINGS.get(name)
    stored = packing.pack(codes_of(packing, (16, 32)))
    with pytest.raises(DQError, match="packed tensor must be"):
        packing.unpack(stored[1:], (16, 32))
    with pytest.raises(DQError, match=r"packed tensor must be|one byte"):
        packing.unpack(stored.to(torch.int64), (16, 32))
    with pytest.raises(DQError, match="packed tensor must be"):
        packing.unpack(stored, (272, 32))


@pytest.mark.parametrize("name", NAMES)
def test_descriptions_are_one_line(name):
    packing = PACKINGS.get(name)
    for text in (packing.description, packing.source):
        assert text and "\n" not in text and len(text) < 140


@pytest.mark.gpu
def test_cuda_gives_the_bytes_of_the_cpu():
    for packing in PACKINGS:
        codes = codes_of(packing, (129, 77))
        stored = packing.pack(codes.cuda())
        assert stored.is_cuda and torch.equal(stored.cpu(), packing.pack(codes)), packing.name
        assert torch.equal(packing.unpack(stored, codes.shape).cpu(), codes), packing.name
