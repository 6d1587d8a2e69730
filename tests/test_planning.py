"""Plans: what they say about a model, that they are pure, that their byte counts are true, and what they refuse."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from dq.loop import quantize_model
from dq.plan_text import time_text
from dq.planning import make_plan, model_bytes, planned_config
from dq.recipe import Recipe, Rule, Target, presets
from dq.records import Record
from dq.registry import DQError
from dq.spec import QuantSpec

DATA_FREE = [n for n in presets(decoders=False) if not Recipe.load(n).needs_calibration]


@pytest.fixture(scope="module")
def flux(tiny):
    """A tiny FLUX.1 that no test of this file changes."""
    return tiny.flux(torch.bfloat16)


def row_of(plan, name):
    return next(r for r in plan.rows if name in r.members)


def quiet(*args, **kwargs):
    from tqdm import tqdm

    return tqdm(*args, **kwargs, disable=True)


def buffer_bytes(model, names):
    layers = [model.get_submodule(n) for n in names]
    return sum(t.numel() * t.element_size() for layer in layers for t in layer.buffers())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", DATA_FREE)
def test_planned_bytes_are_the_real_ones(name, dtype, tiny):
    model = tiny.flux(dtype)
    plan = make_plan(model, tiny.recipe(name))
    assert plan.bytes_before == model_bytes(model) == model_bytes(tiny.flux(torch.bfloat16))
    report = quantize_model(model, plan, progress=quiet)
    assert report.bytes_before == plan.bytes_before and report.bytes_after == plan.bytes_after == model_bytes(model)
    for row in plan.quantized:
        assert row.nbytes == buffer_bytes(model, row.members), row.members


@pytest.mark.parametrize("transforms", [["smooth"], ["rotate"], ["lowrank"], ["smooth", "rotate", "lowrank"]])
def test_planned_bytes_count_what_transforms_leave(transforms, tiny):
    target = Target.from_dict({"weights": "int4/group16", "activations": "int4/token", "transforms": transforms})
    model = tiny.flux(torch.bfloat16)
    plan = make_plan(model, Recipe("mine", target, target, min_features=16))
    records = [Record((), tiny.flux_inputs(torch.bfloat16, batch=2))]
    report = quantize_model(model, plan, records, progress=quiet)
    assert report.bytes_after == plan.bytes_after
    for row in plan.quantized:
        assert row.nbytes == buffer_bytes(model, row.members), row.members


def test_groups_of_flux(flux, tiny):
    plan = make_plan(flux, tiny.recipe("w4a4-int4-svd"))
    double, single = "transformer_blocks.1.attn", "single_transformer_blocks.0"
    qkv = tuple(f"{double}.{n}" for n in ("to_q", "to_k", "to_v"))
    row = row_of(plan, qkv[1])
    assert row.members == qkv and row.inputs == (qkv,) and row.lowrank == (qkv,)
    assert row.shapes == ((64, 64),) * 3 and row.block == "transformer_blocks.1"
    single_qkv = tuple(f"{single}.attn.{n}" for n in ("to_q", "to_k", "to_v"))
    row = row_of(plan, f"{single}.proj_mlp")
    assert set(row.members) == {*single_qkv, f"{single}.proj_mlp"} and len(row.inputs) == 1
    assert set(row.lowrank) == {single_qkv, (f"{single}.proj_mlp",)}
    row = row_of(plan, f"{double}.to_out.0")
    assert row.inputs == ((f"{double}.to_out.0",), (f"{double}.to_add_out",))
    assert row.lowrank == row.inputs
    row = row_of(plan, f"{single}.proj_out")
    assert row.members == (f"{single}.proj_out",) and row.k_parts == (64, 256)


def test_linears_share_factors_only_where_smoothed(flux, tiny):
    """Without smoothing, to_out.0 and to_add_out have nothing in common and stand in rows of their own."""
    row = row_of(make_plan(flux, tiny.recipe("w4a4-int4")), "transformer_blocks.0.attn.to_out.0")
    assert row.members == ("transformer_blocks.0.attn.to_out.0",)


def test_every_linear_stands_in_one_row(flux, tiny):
    linears = {n: m for n, m in flux.named_modules() if isinstance(m, nn.Linear)}
    for name in presets():
        plan = make_plan(flux, tiny.recipe(name))
        members = [m for r in plan.rows for m in r.members]
        assert sorted(members) == sorted(linears)
        for row in plan.rows:
            assert row.shapes == tuple((linears[m].out_features, linears[m].in_features) for m in row.members)
            assert sorted(m for i in row.inputs for m in i) == sorted(row.members)
            assert sorted(m for i in row.lowrank for m in i) == sorted(row.members)


def test_plans_are_pure(flux, tiny):
    before = {k: v.clone() for k, v in flux.state_dict().items()}
    one, two = (make_plan(flux, tiny.recipe("w4a4-nvfp4-svd")) for _ in range(2))
    assert one == two and str(one) == str(two)
    after = flux.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)


def test_plan_needs_no_weights(tiny):
    with torch.device("meta"):
        model = tiny.flux()
    assert make_plan(model, tiny.recipe("fp8")).quantized


def test_printing(flux, tiny):
    plan = make_plan(flux, tiny.recipe("w4a4-int4-svd"), skip=["to_add_out"])
    text = str(plan)
    lines = text.splitlines()
    assert lines[0] == "FluxTransformer2DModel: recipe w4a4-int4-svd, family flux.1"
    assert re.search(
        r"transformer_blocks\.\*\.attn\.to_q \+ to_k \+ to_v +2 x 192x64 .*W int4/group64  X int4/group64", text
    )
    assert "smooth search=True, lowrank, gptq damp=1.0" in text
    assert re.search(r"proj_out +1 x 16x64 .* 16-bit: input or output projection", text)
    assert re.search(r"to_add_out +2 x 64x64 .* 16-bit: skipped by the caller", text)
    assert re.search(r"norm1\.linear +2 x 384x64 .*W int4/group64@imatrix  X 16-bit  gptq", text)
    assert re.search(
        r"weights 967 KB -> \d+ KB; under a second on two CPU cores \(far less on a GPU\) and the runs that calibrate",
        text,
    )
    assert len(lines) < 30, "one line per kind of group, however many blocks there are"


def test_times_are_said_in_a_unit_that_suits_them():
    said = {0.4: "under a second", 14.2: "about 14 s", 300.0: "about 5 min", 16800.0: "about 4.7 h"}
    assert [time_text(s) for s in said] == list(said.values())


def test_estimates(flux, tiny):
    cheap, dear = (make_plan(flux, tiny.recipe(n)) for n in ("w4a4-int4", "w4a4-int4-svd"))
    assert 0 < cheap.seconds < dear.seconds
    assert cheap.bytes_after < cheap.bytes_before < cheap.peak_bytes
    assert cheap.bytes_after < dear.bytes_after  # the low-rank factors


def test_blocks_come_in_model_order_and_the_rest_last(flux, tiny):
    recipe = tiny.recipe("fp8", rules=(Rule("x_embedder", Target(QuantSpec("int8", "channel"))),))
    blocks = make_plan(flux, recipe).blocks()
    expected = [f"transformer_blocks.{i}" for i in (0, 1)] + [f"single_transformer_blocks.{i}" for i in (0, 1)]
    assert blocks == [*expected, ""]


def test_rules(flux, tiny):
    """The first rule that matches wins, over the family's own skips too; a target of its own leaves the group."""
    w8 = Target(QuantSpec("int8", "channel"))
    rules = (
        Rule("transformer_blocks.1.ff.net.2", None, "massive activations"),
        Rule("ff.net.2", w8),
        Rule("transformer_blocks.*.attn.to_v", w8),
        Rule("proj_out", w8),
    )
    plan = make_plan(flux, tiny.recipe("w4a4-int4", rules=rules))
    kept = row_of(plan, "transformer_blocks.1.ff.net.2")
    assert kept.target is None and kept.reason == "massive activations"
    assert row_of(plan, "transformer_blocks.0.ff.net.2").target == w8
    assert row_of(plan, "transformer_blocks.0.attn.to_v").members == ("transformer_blocks.0.attn.to_v",)
    assert len(row_of(plan, "transformer_blocks.0.attn.to_q").members) == 2
    assert row_of(plan, "proj_out").target == w8


def test_modulation(flux, tiny):
    plan = make_plan(flux, tiny.recipe("fp8", modulation=None))
    row = row_of(plan, "transformer_blocks.0.norm1.linear")
    assert row.target is None and row.reason == "modulation"
    plan = make_plan(flux, tiny.recipe("fp8"))
    assert row_of(plan, "single_transformer_blocks.1.norm.linear").target.activations is None


@pytest.mark.parametrize(
    ("skip", "members"),
    [
        (["*.to_out.0"], ["transformer_blocks.0.attn.to_out.0", "transformer_blocks.1.attn.to_out.0"]),
        (["transformer_blocks.0"], ["transformer_blocks.0.ff.net.2", "transformer_blocks.0.attn.to_q"]),
        (["single_transformer_blocks.1.proj_mlp"], ["single_transformer_blocks.1.proj_mlp"]),
    ],
)
def test_skip(flux, tiny, skip, members):
    plan = make_plan(flux, tiny.recipe("fp8"), skip)
    for name in members:
        assert row_of(plan, name).reason == "skipped by the caller"
    assert row_of(plan, "transformer_blocks.1.ff.net.2").target is not None
    assert row_of(plan, "single_transformer_blocks.1.attn.to_q").target is not None


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        (["to_ouut"], r"skip pattern 'to_ouut' matches no linear; did you mean 'to_out'"),
        (["to_q", "proj_mpl"], r"skip pattern 'proj_mpl' matches no linear; did you mean 'proj_mlp'"),
        (["transformer_blocks.7"], r"skip pattern 'transformer_blocks.7' matches no linear"),
        ("to_q", r"skip takes a list of patterns, got the string 'to_q'"),
    ],
)
def test_skip_patterns_that_match_nothing(flux, tiny, skip, message):
    with pytest.raises(DQError, match=message):
        make_plan(flux, tiny.recipe("fp8"), skip)


def test_nothing_to_quantize(flux):
    with pytest.raises(
        DQError, match=r"nothing to quantize in FluxTransformer2DModel: of 50 linears, .* stay 16-bit"
    ) as e:
        make_plan(flux, "fp8")
    assert "too small to quantize" in str(e.value) and "with_(min_features=16)" in str(e.value)
    from transformers.pytorch_utils import Conv1D

    with pytest.raises(DQError, match=r"of 1 linears, 1 stay 16-bit .*; 1 Conv1D of transformers stay in 16 bits"):
        make_plan(nn.Sequential(Conv1D(512, 512), nn.Linear(8, 8)), "int8")
    with pytest.raises(DQError, match=r"nothing to quantize in Sequential: it holds no nn\.Linear$"):
        make_plan(nn.Sequential(nn.LayerNorm(4)), "fp8")


def test_quantized_twice(tiny):
    model = tiny.flux(torch.bfloat16)
    quantize_model(model, make_plan(model, tiny.recipe("fp8")), progress=quiet)
    with pytest.raises(DQError, match=r"FluxTransformer2DModel is quantized already; dq\.dequantize"):
        make_plan(model, tiny.recipe("int8"))


def test_size_bounds():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.big, self.odd, self.small = nn.Linear(48, 64), nn.Linear(50, 64), nn.Linear(16, 64)

    recipe = Recipe.load("int8").with_(min_features=32)
    plan = make_plan(Net(), recipe)
    assert [m for r in plan.quantized for m in r.members] == ["big", "odd"]
    assert row_of(plan, "small").reason == "too small to quantize (64x16, bound 32)"
    plan = make_plan(Net(), recipe.with_(multiple=16))
    assert [m for r in plan.quantized for m in r.members] == ["big"]


def test_tied_weights_stay():
    """Quantizing a linear whose weight is also an embedding would untie the two."""
    model = nn.Module()
    model.embed, model.body, model.head = nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 64, bias=False)
    model.head.weight = model.embed.weight
    plan = make_plan(model, Recipe.load("int8").with_(min_features=16))
    assert row_of(plan, "head").target is None and row_of(plan, "head").reason == "tied to embed"
    assert plan.bytes_before == model_bytes(model)


def test_unknown_models_say_what_was_assumed(tiny):
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)) for _ in range(3))
    text = str(make_plan(model, tiny.recipe("int8")))
    assert "note: Module is no known family. Assumed: repeated blocks layers (3)" in text


def test_flux_dev_on_paper():
    """The full FLUX.1-dev, without weights: shares and sizes as measured for the real model."""
    from diffusers import FluxTransformer2DModel

    with torch.device("meta"):
        model = FluxTransformer2DModel(guidance_embeds=True).to(torch.bfloat16)
    plan = make_plan(model, "w4a16")
    total = sum(p.numel() for p in model.parameters())

    def share(rows):
        return 100 * sum(r.elements for r in rows) / total

    modulation = [r for r in plan.quantized if "norm" in r.members[0]]
    ordinary = [r for r in plan.quantized if "norm" not in r.members[0]]
    assert share(modulation) == pytest.approx(27.13, abs=0.02)
    assert share(ordinary) == pytest.approx(72.33, abs=0.05)
    assert share(r for r in plan.rows if r.target is None) == pytest.approx(0.54, abs=0.01)
    assert plan.bytes_before == pytest.approx(23.80e9, rel=1e-3)
    assert sum(r.nbytes for r in ordinary) == pytest.approx(4.57e9, rel=2e-3)
    assert len(plan.blocks()) == 19 + 38
    assert len(str(plan).splitlines()) < 30


def sequence(*layers):
    return nn.Sequential(*layers)


def test_messages_about_nothing(flux, tiny):
    """What is said must be the reason, and the advice must help."""
    with pytest.raises(DQError, match=r"50 stay 16-bit \(skipped by the caller\)$"):
        make_plan(flux, tiny.recipe("fp8"), skip=["*"])
    tied = sequence(nn.Linear(32, 32), nn.Linear(32, 32))
    tied[1].weight = tied[0].weight
    with pytest.raises(DQError, match=r"of 2 linears, 1 stay 16-bit \(tied to 1\).*\(tied to 0\)$"):
        make_plan(tied, tiny.recipe("fp8"))
    with pytest.raises(DQError, match=r"a lone Linear has no name .* nn\.Sequential\(layer\)"):
        make_plan(nn.Linear(512, 512), "fp8")


def test_subclasses_of_linear_are_named(tiny):
    class Mine(nn.Linear):
        pass

    with pytest.raises(DQError, match=r"it holds no nn\.Linear; subclasses of nn\.Linear stay in 16 bits: Mine$"):
        make_plan(sequence(Mine(64, 64)), tiny.recipe("fp8"))
    assert "note: subclasses of nn.Linear stay in 16 bits: Mine" in str(
        make_plan(sequence(Mine(64, 64), nn.Linear(64, 64)), tiny.recipe("fp8"))
    )


def test_long_lists_are_cut(flux, tiny):
    with pytest.raises(DQError, match=r"skip pattern 'zzz' matches no linear; known: .* \.\.\.$") as error:
        make_plan(flux, tiny.recipe("fp8"), skip=["zzz"])
    assert len(str(error.value)) < 700


@pytest.mark.parametrize("skip", [5, None, "to_q", {"to_q": 1}, [5], [None]])
def test_what_is_no_skip(flux, tiny, skip):
    with pytest.raises(DQError, match=r"skip takes a list of patterns|a skip pattern is text"):
        make_plan(flux, tiny.recipe("fp8"), skip)


def test_groups_longer_than_rows_and_empty_layers(tiny):
    model = sequence(nn.Linear(512, 512), nn.Linear(0, 512), nn.Linear(512, 64))
    long = Target(QuantSpec.parse("int4/group999999"))
    recipe = Recipe("mine", long, rules=(Rule("2", Target(QuantSpec.parse("int4/group1024"))),), min_features=0)
    plan = make_plan(model, recipe)
    assert row_of(plan, "0").reason == "groups of int4/group999999 are longer than its K = 512"
    assert row_of(plan, "1").reason == "empty" and row_of(plan, "2").target is not None
    quantize_model(model, plan, progress=quiet)


def test_rotations_that_do_not_fit_are_refused_by_the_plan(flux, tiny):
    target = Target.from_dict({"weights": "int8/channel", "transforms": [{"name": "rotate", "size": 1024}]})
    with pytest.raises(DQError, match=r"rotation size 1024 does not divide the input width \(64,\) of transformer_b"):
        make_plan(flux, Recipe("mine", target, min_features=16))


def test_ranks_beyond_the_whole_are_remarked():
    """Clipped, and the plan says so once per shape."""
    model = nn.Sequential(nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 128))
    target = Target.from_dict(dict(weights="int4/group16", transforms=[dict(name="lowrank", rank=24)]))
    plan = make_plan(model, Recipe("r", target, min_features=1))
    assert plan.remarks == tuple(
        f"{name}: rank 24 is more than a matrix of {shape} has: 16"
        for name, shape in (("3", "128x16"), ("1", "16x16"), ("0", "16x64"))
    )
    assert planned_config((16, 64), plan.rows[0]).rank == 16
    assert not make_plan(model, Recipe("r", replace(target, transforms=(("lowrank", ()),)), min_features=1)).remarks
