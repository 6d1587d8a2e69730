"""`QuantSpec` as a value: words, short forms, dictionaries, sizes."""

import json

import pytest
import torch

from dq.qtensor import quantize
from dq.registry import DQError
from dq.spec import FORMATS, SCALE_DTYPES, SPECS, STRATEGIES, QuantSpec

TEXTS = [s.name for s in SPECS]
TEXTS += [f"{f.name}/{s}" for f in FORMATS for s in ("tensor", "channel", "token", "group32", "block128x64")]
TEXTS += [
    "nvfp4@sweep",
    "nvfp4-token@4over6",
    "mxfp4@best2",
    "mxfp8@absmax",
    "int4/channel@mse",
    "int4/group64@imatrix",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_and_dictionary_round_trips(text):
    spec = QuantSpec.parse(text)
    assert QuantSpec.parse(str(spec)) == spec and str(spec) == text
    assert QuantSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert hash(QuantSpec.from_dict(spec.to_dict())) == hash(spec)


def test_parse():
    assert QuantSpec.parse("int8") == QuantSpec("int8", "tensor")
    assert QuantSpec.parse("int8/token") == QuantSpec("int8", "token", dynamic=True)
    assert QuantSpec.parse("fp8_e4m3/channel") == QuantSpec("fp8_e4m3", "channel")
    assert QuantSpec.parse("int4/group64") == QuantSpec("int4", "group", 64, scale_format="fp16")
    nvfp4 = QuantSpec.parse("nvfp4")
    assert (nvfp4.format, nvfp4.group_size, nvfp4.scale_format) == ("fp4_e2m1", 16, "fp8_e4m3")
    assert nvfp4.global_scale == "tensor" and QuantSpec.parse("nvfp4-token").global_scale == "token"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nvpf4", r"unknown spec 'nvpf4'; did you mean 'nvfp4'"),
        ("int9/token", r"unknown spec 'int9/token'; did you mean 'int8' or 'int4'"),
        ("int8/tokens", r"unknown strategy 'tokens'; did you mean 'token'"),
        ("int4/groupX", r"write the group size as group64"),
        ("int4/group", r"write the group size as group64"),
        ("int4/block16", r"a block as block128x128"),
        ("int4/block0x4", r"sizes must be at least 1, got \[0, 4\]"),
        ("nvfp4@swep", r"unknown scale rule 'swep'; did you mean 'sweep'"),
        ("nvpf4@sweep", r"unknown spec 'nvpf4'; did you mean 'nvfp4'"),
        ("int4/group0", r"sizes must be at least 1, got \[0\]"),
    ],
)
def test_texts_that_are_refused(text, message):
    with pytest.raises(DQError, match=message):
        QuantSpec.parse(text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(format="int9"), r"unknown format 'int9'; did you mean 'int8' or 'int4'"),
        (dict(format="int8", strategy="row"), r"unknown strategy 'row'"),
        (dict(format="int8", strategy="group"), r"group_size=None do not go together"),
        (dict(format="int8", strategy="token", group_size=16), r"group_size=16 do not go together"),
        (dict(format="int8", scale_format="fp64"), r"unknown scale format 'fp64'; did you mean"),
        (dict(format="int8", global_scale="row"), r"global_scale must be tensor, token or None, got 'row'"),
        (dict(format="int8", scale_rule="absmin"), r"unknown scale rule 'absmin'"),
        (dict(format="int8", strategi="token"), r"unknown QuantSpec field \['strategi'\]; did you mean 'strategy'"),
        (dict(format="int8", strategy="block"), r"block_size=None do not go together"),
        (dict(format="int8", strategy="block", block_size=(4,)), r"sizes must be at least 1, got \[4\]"),
        (dict(format="int8", strategy="group", group_size=8, k_segments=(8, 8)), r"k_segments go with the strategies"),
    ],
)
def test_fields_that_are_refused(fields, message):
    with pytest.raises(DQError, match=message):
        QuantSpec.from_dict(fields)


def test_dictionary_leaves_defaults_out():
    assert QuantSpec("int8", "channel").to_dict() == {"format": "int8", "strategy": "channel"}


def test_tuples_survive_json():
    """JSON knows lists only."""
    fields = dict(row_segments=(3, 5), k_segments=(4, 4), rule_params=(("p", 99.0),), scale_rule="percentile")
    spec = QuantSpec("int8", "tensor", **fields)
    back = QuantSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert back == spec and hash(back) == hash(spec) and back.row_segments == (3, 5)
    block = QuantSpec("fp8_e4m3", "block", block_size=(128, 64))
    assert QuantSpec.from_dict(json.loads(json.dumps(block.to_dict()))) == block


def test_unknown_profile():
    with pytest.raises(DQError, match=r"unknown profile 'gtpq'; did you mean 'gptq'"):
        quantize(torch.ones(1, 4), QuantSpec("int8", profile="gtpq"))


def test_with_is_a_copy():
    spec = QuantSpec("int4", "group", 64)
    assert spec.with_(group_size=32).group_size == 32 and spec.group_size == 64
    with pytest.raises(DQError):
        spec.with_(strategy="token")


@pytest.mark.parametrize(
    ("text", "rows", "width", "nbytes"),
    [
        # Bits per value of the specification, section 1: INT4 g64 with 16-bit scales 4.25, NVFP4 4.5 plus one float32.
        ("int4/group64", 128, 1024, 128 * 1024 * 4.25 / 8),
        ("nvfp4", 128, 1024, 128 * 1024 * 4.5 / 8 + 4),
        ("nvfp4-token", 128, 1024, 128 * 1024 * 4.5 / 8 + 4 * 128),
        ("int8/channel", 128, 1024, 128 * 1024 + 4 * 128),
        ("fp8_e4m3/tensor", 128, 1024, 128 * 1024 + 4),
        # MX: 4.25, 6.25 and 8.25 with one exponent per 32; 3-bit codes lie dense; asymmetric adds 8 bits per group.
        ("mxfp4", 128, 1024, 128 * 1024 * 4.25 / 8),
        ("mxfp6", 128, 1024, 128 * 1024 * 6.25 / 8),
        ("mxfp8", 128, 1024, 128 * 1024 * 8.25 / 8),
        ("mxint8", 128, 1024, 128 * 1024 * 8.25 / 8),
        ("int3/channel", 128, 1024, 128 * 1024 * 3 / 8 + 4 * 128),
        ("int2/channel", 128, 1024, 128 * 1024 * 2 / 8 + 4 * 128),
        ("uint4/group64", 128, 1024, 128 * 1024 * 4.375 / 8),
        ("nf4", 128, 1024, 128 * 1024 * 4.5 / 8),
        ("bf16", 128, 1024, 128 * 1024 * 2),
        ("fp8-block", 200, 300, 200 * 384 + 4 * 2 * 3),
        # A shorter last group has its own scale and is stored whole; an odd row ends in half a byte of padding.
        ("nvfp4-single", 3, 17, 3 * (2 * 8 + 2)),
        ("int4/channel", 3, 5, 3 * (3 + 4)),
    ],
)
def test_nbytes(text, rows, width, nbytes):
    spec = QuantSpec.parse(text)
    assert spec.nbytes(rows, width) == nbytes
    assert quantize(torch.randn(rows, width), spec).nbytes == nbytes


def test_words_are_known_to_torch():
    assert set(STRATEGIES) == {"tensor", "channel", "token", "group", "block"}
    assert all(isinstance(d, torch.dtype) for d in SCALE_DTYPES.values())


def test_double_quantization_bits():
    """Item 19 of the specification: 8/64 + 32/(64*256) = .126953 bits per value instead of .5 for the scales of NF4."""
    single, double = QuantSpec.parse("nf4"), QuantSpec.parse("nf4-double")
    assert single.bits_per_value() == 4.5
    mean = 32 / (4096 * 4096)  # one more number per tensor
    assert double.bits_per_value() - 4 == pytest.approx(0.126953, abs=1e-6 + mean)


@pytest.mark.parametrize(
    ("text", "changes"),
    [("int4/group64/fp8_e4m3", {"scale_format": "fp8_e4m3"}), ("int4/group64/fp32", {"scale_format": "fp32"})],
)
def test_another_scale_format_is_printed(text, changes):
    spec = QuantSpec.parse("int4/group64")
    assert str(spec) == "int4/group64" and str(spec.with_(**changes)) == text
    assert str(QuantSpec.parse("int8/channel").with_(scale_format="bf16")) == "int8/channel/bf16"
