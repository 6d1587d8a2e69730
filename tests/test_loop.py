"""The block loop: what it feeds to whom, all or nothing, groups checked on values, what the report says."""

import io
import math
import re
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from tqdm import tqdm

import dq.loop
from dq.linear import QuantizedLinear, quantized_linears
from dq.loop import dequantize_model, quantize_model
from dq.planning import make_plan, model_bytes
from dq.recipe import Recipe, Rule, Target, presets
from dq.records import Record
from dq.registry import DQError
from dq.spec import QuantSpec


def quiet(*args, **kwargs):
    return tqdm(*args, **kwargs, disable=True)


def run(model, recipe, records=(), **kwargs):
    kwargs.setdefault("progress", quiet)
    return quantize_model(model, make_plan(model, recipe), records, **kwargs)


def state(model):
    """Every tensor as bytes, so that any dtype and any NaN compares."""
    return {k: (v.dtype, v.contiguous().view(torch.uint8).clone()) for k, v in model.state_dict().items()}


def same_state(a, b):
    return a.keys() == b.keys() and all(a[k][0] == b[k][0] and torch.equal(a[k][1], b[k][1]) for k in a)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Chain(nn.Module):
    """Blocks whose first linear reads the block's input as it is."""

    def __init__(self, depth=3):
        super().__init__()
        self.blocks, self.last = nn.ModuleList(Block() for _ in range(depth)), nn.Linear(32, 32)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def recipe(weights="int4/channel", activations="int4/token", **changes):
    acts = None if activations is None else QuantSpec.parse(activations)
    return Recipe("mine", Target(QuantSpec.parse(weights), acts), min_features=16, **changes)


OUTSIDE = Rule("last", recipe().linear)  # outside the blocks of a model that is no known family, left in 16 bits else


def chain_records(n=3):
    return [Record((torch.randn(5, 32),), {}, i, i, n) for i in range(n)]


@pytest.fixture
def inputs_used(monkeypatch):
    """first linear of an input group -> the calibration rows with which it was quantized."""
    used, original = {}, dq.loop.quantize_row

    def spy(model, row, stats, device=None):
        used.update({i[0]: stats[i[0]].rows.clone() for i in row.inputs if i[0] in stats})
        return original(model, row, stats, device)

    monkeypatch.setattr(dq.loop, "quantize_row", spy)
    return used


def inputs_of(model, names, records):
    """What the linears receive in ordinary forwards over all records."""
    seen = {n: [] for n in names}
    handles = [
        model.get_submodule(n).register_forward_pre_hook(
            lambda m, a, n=n: seen[n].append(a[0].reshape(-1, a[0].shape[-1]))
        )
        for n in names
    ]
    with torch.no_grad():
        for r in records:
            model(*r.args, **r.kwargs)
    for h in handles:
        h.remove()
    return {n: torch.cat(rows) for n, rows in seen.items()}


FIRST = [f"blocks.{i}.up" for i in range(3)]


@pytest.mark.parametrize("keep_outputs", [True, False])
@pytest.mark.parametrize("prefix", ["fp", "quantized"])
def test_prefix(prefix, keep_outputs, inputs_used):
    """`fp`: what the 16-bit model feeds the block; `quantized`: what the finished blocks before it do."""
    model, records = Chain(), chain_records()
    full = inputs_of(model, [*FIRST, "last"], records)
    plan = make_plan(model, recipe(rules=(OUTSIDE,)))
    plan = replace(plan, family=replace(plan.family, keep_outputs=keep_outputs))
    quantize_model(model, plan, records, prefix=prefix, progress=quiet)
    low = inputs_of(model, FIRST, records)
    for name in FIRST:
        assert torch.equal(inputs_used[name], (full if prefix == "fp" else low)[name]), name
    assert torch.equal(full[FIRST[0]], low[FIRST[0]]) and not torch.equal(full[FIRST[2]], low[FIRST[2]])
    assert torch.equal(inputs_used["last"], full["last"]), "outside all blocks the 16-bit model is what there is"


@pytest.mark.parametrize("case", ["chain", "flux"])
def test_every_linear_behind_the_quantized_ones(case, tiny, inputs_used):
    """`linears`: each is calibrated on exactly what the finished model feeds it, within a block too."""
    if case == "chain":
        model, records, mine = Chain(), chain_records(), recipe()
    else:
        model, records = tiny.flux(), [Record((), tiny.flux_inputs(batch=2, seed=s), step=s) for s in (0, 1)]
        mine = tiny.recipe("w4a4-int4")
    steps = []
    bar = lambda *a, **k: steps.append(tqdm(*a, **k, file=io.StringIO())) or steps[-1]  # noqa: E731
    plan = make_plan(model, mine)
    quantize_model(model, plan, records, prefix="linears", progress=bar)
    names = [i[0] for r in plan.quantized for i in r.inputs if r.block]
    low = inputs_of(model, names, records)
    assert len(names) > 5 and set(names) <= set(inputs_used)
    for name in names:
        assert torch.equal(inputs_used[name], low[name].float()), name
    assert steps[0].n == steps[0].total


def test_prefix_of_flux(tiny, inputs_used):
    """On a real architecture: the first block is fed alike, later ones are not, and the spread stays small."""
    records = [Record((), tiny.flux_inputs(batch=2))]
    used = {}
    for prefix in ("fp", "quantized"):
        inputs_used.clear()
        run(tiny.flux(), tiny.recipe("w4a4-nvfp4-svd"), records, prefix=prefix)
        used[prefix] = dict(inputs_used)
    assert used["fp"].keys() == used["quantized"].keys()
    first, late = "transformer_blocks.0.attn.to_q", "single_transformer_blocks.1.attn.to_q"
    assert torch.equal(used["fp"][first], used["quantized"][first])
    difference = (used["fp"][late] - used["quantized"][late]).norm() / used["fp"][late].norm()
    assert 0 < difference < 0.5


def test_inputs_of_flux(tiny, inputs_used):
    """With a 16-bit prefix every linear is calibrated on exactly what it gets in a full forward."""
    model, records = tiny.flux(), [Record((), tiny.flux_inputs(batch=2, seed=s), step=s) for s in (0, 1)]
    plan = make_plan(model, tiny.recipe("int8-smooth"))
    firsts = [i[0] for r in plan.quantized for i in r.inputs]
    full = inputs_of(model, firsts, records)
    quantize_model(model, plan, records, progress=quiet)
    assert sorted(inputs_used) == sorted(firsts)
    for name in firsts:
        assert torch.equal(inputs_used[name], full[name].float()), name


@pytest.mark.parametrize("name", presets())
def test_every_preset(name, tiny):
    """End to end on a tiny FLUX.1: close to the 16-bit model, twice the same bits, and a report that adds up."""
    outputs, states = [], []
    for _ in range(2):
        model = tiny.flux(torch.bfloat16)
        inputs = tiny.flux_inputs(torch.bfloat16, batch=2)
        records = [Record((), inputs)] if Recipe.load(name).needs_calibration else []
        with torch.no_grad():
            reference = model(**inputs)[0].float()
            report = run(model, tiny.recipe(name), records)
            outputs.append(model(**inputs)[0].float())
        states.append(state(model))
    error = (outputs[0] - reference).norm() / reference.norm()
    assert error < (0.45 if "a4" in name else 0.25 if name.startswith("w4") else 0.08), float(error)
    assert same_state(*states) and torch.equal(*outputs)
    planned = [m for r in report.plan.quantized for m in r.members]
    assert sorted(x.name for x in report.layers) == sorted(planned) == sorted(quantized_linears(model))
    assert (
        report.recipe == name and report.seconds > 0 and report.bytes_after == model_bytes(model) < report.bytes_before
    )
    assert all(x.sqnr_db > (10 if name.startswith("w4") else 25) for x in report.layers)
    assert f"{name}: {len(planned)} linears in" in str(report) and "lowest SQNR" in str(report)
    assert model.dq_artifact["recipe"]["name"] == name and model.dq_artifact["versions"]["torch"] == torch.__version__


def test_progress_counts_to_its_total(tiny):
    """Rows, and block runs of calibration: the bar must end where it said it would."""
    for name, records in (("fp8", []), ("int8-smooth", [Record((), tiny.flux_inputs(seed=s)) for s in (0, 1)])):
        bars = []

        def bar(*args, bars=bars, **kwargs):
            bars.append(tqdm(*args, **kwargs, file=io.StringIO()))
            return bars[-1]

        run(tiny.flux(), tiny.recipe(name), records, progress=bar)
        assert bars[0].n == bars[0].total > 0


class Attention(nn.Module):
    """Linears that look like one group by name; what they read is up to `forward`."""

    def __init__(self, order):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(32, 32) for _ in range(3))
        self.order = order

    def forward(self, x):
        inputs = {"to_q": x, "to_k": x + 1, "to_v": x.clone()}
        return sum(getattr(self, name)(inputs[name]) for name in self.order)


@pytest.mark.parametrize("order", [("to_q", "to_k", "to_v"), ("to_k", "to_v", "to_q"), ("to_v", "to_q", "to_k")])
def test_shared_inputs_are_checked_on_values(order):
    """to_v gets an equal copy and stays, to_k gets something else and leaves, whoever is called first."""
    model = nn.Sequential()
    model.blocks = nn.ModuleList(Attention(order) for _ in range(2))
    model.forward = lambda x: model.blocks[1](model.blocks[0](x))
    target = Target(QuantSpec.parse("int8/channel"), QuantSpec.parse("int8/token"), (("smooth", (("alpha", 0.5),)),))
    plan = make_plan(model, Recipe("mine", target, min_features=16))
    assert len(plan.quantized) == 2
    with pytest.warns(UserWarning, match="to_k do not receive the same input as"):
        report = quantize_model(model, plan, [Record((torch.randn(40, 32),), {})], progress=quiet)
    rows = [r.members for r in report.plan.rows]
    assert rows == [
        (f"blocks.{i}.to_q", f"blocks.{i}.to_v") if n == 0 else (f"blocks.{i}.to_k",) for i in (0, 1) for n in (0, 1)
    ]
    assert len(report.plan.remarks) == 2 and "to_k do not receive the same input" in str(report.plan)
    block = model.blocks[0]
    assert torch.equal(block.to_q.smooth_factor, block.to_v.smooth_factor)
    assert not torch.equal(block.to_q.smooth_factor, block.to_k.smooth_factor)


def test_fused_linears_share_the_second_level(tiny):
    """Runtimes run q, k and v as one matrix: one second-level scale, that of the largest of them."""
    model = tiny.flux()
    raw = {n: m.weight.detach().clone() for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    run(model, tiny.recipe("w4a4-nvfp4"))
    names = [f"single_transformer_blocks.0.{n}" for n in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")]
    scales = {model.get_submodule(n).weight_global_scale.item() for n in names}
    assert len(scales) == 1
    assert scales.pop() == pytest.approx(max(float(raw[n].abs().max()) for n in names) / (6 * 448), rel=1e-6)


def test_blocks_called_twice_fall_back_to_the_whole_model(inputs_used):
    model, records = Chain(2), chain_records()
    model.forward = lambda x: model.last(model.blocks[1](model.blocks[0](model.blocks[0](x))))
    full = inputs_of(model, ["blocks.0.up", "blocks.1.up"], records)
    report = run(model, recipe(rules=(OUTSIDE,)), records)
    assert "blocks are not called exactly once each" in str(report.plan)
    for name, rows in full.items():
        assert torch.equal(inputs_used[name], rows)
    assert len(quantized_linears(model)) == 5


def test_blocks_without_work_are_passed_through(inputs_used):
    """A block that the recipe keeps in 16 bits still has to run, or the next one starves."""
    model, records = Chain(), chain_records()
    full = inputs_of(model, FIRST, records)
    run(model, recipe(rules=(Rule("blocks.1"), OUTSIDE)), records)
    assert set(quantized_linears(model)) == {"blocks.0.up", "blocks.0.down", "blocks.2.up", "blocks.2.down", "last"}
    assert torch.equal(inputs_used["blocks.2.up"], full["blocks.2.up"])


def test_calibration_is_asked_for(tiny):
    with pytest.raises(DQError, match=r"recipe 'int8-smooth' needs calibration and got no records; pass calibration="):
        run(tiny.flux(), tiny.recipe("int8-smooth"))


def test_prefix_word():
    with pytest.raises(DQError, match="prefix must be 'fp', 'quantized' or 'linears', got 'half'"):
        run(Chain(), recipe(), prefix="half")


def test_bad_weight_is_named_and_nothing_is_touched():
    model = Chain()
    model.blocks[1].down.weight.data[3, 4] = float("nan")
    before = state(model)
    with pytest.raises(DQError, match=r"blocks\.1\.down\.weight holds 1 NaN or Inf"):
        run(model, recipe(), chain_records())
    assert same_state(state(model), before) and not quantized_linears(model)


def test_bad_record_is_named_and_nothing_is_touched():
    model, records = Chain(), chain_records()
    records[2].args[0][1, 1] = float("inf")
    before = state(model)
    with pytest.raises(DQError, match=r"blocks\.0\.up: a calibration input \(stratum 2/single\) holds 1 NaN or Inf"):
        run(model, recipe(rules=(Rule("last"),)), records)
    assert same_state(state(model), before) and not quantized_linears(model)
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_failure_in_the_last_block_leaves_the_model_alone(monkeypatch):
    """All or nothing: a model with half its blocks quantized would be silently wrong."""
    model, original = Chain(), dq.loop.quantize_row
    before = state(model)

    def fails(model, row, stats, device=None):
        if "blocks.2.down" in row.members:
            raise MemoryError("made up")
        return original(model, row, stats, device)

    monkeypatch.setattr(dq.loop, "quantize_row", fails)
    for prefix in ("fp", "quantized", "linears"):
        with pytest.raises(MemoryError):
            run(model, recipe(), chain_records(), prefix=prefix)
        assert same_state(state(model), before) and not quantized_linears(model)
        assert not any("forward" in m.__dict__ for m in model.modules())


def test_offloaded_weights_are_refused():
    with torch.device("meta"):
        model = Chain()
    with pytest.raises(DQError, match=r"blocks\.0\.up\.weight holds no data"):
        run(model, recipe())


def test_mode_device_and_bias_follow_the_original():
    model = Chain().eval()
    model.blocks[0].up.train()
    model.blocks[1].up = nn.Linear(32, 64, bias=False)
    biases = {n: m.bias for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    run(model.bfloat16(), recipe("int8/channel", "int8/token"), device="cpu")
    assert model.blocks[0].up.training and not model.blocks[0].down.training
    for name, layer in quantized_linears(model).items():
        assert isinstance(layer, QuantizedLinear) and layer.compute_dtype == torch.bfloat16
        assert (layer.bias is None) == (biases[name] is None)
        assert layer.bias is None or (layer.bias.dtype == torch.bfloat16 and torch.equal(layer.bias, biases[name]))


@pytest.mark.parametrize("name", ["w4a16", "int8-smooth", "w4a4-nvfp4-svd"])
def test_dequantize(name, tiny):
    """16-bit linears are back under their names and hold the weights that the quantized ones stood for."""
    model, inputs = tiny.flux(), tiny.flux_inputs(batch=2)
    keys = set(model.state_dict())
    run(model, tiny.recipe(name), [Record((), inputs)])
    for layer in quantized_linears(model).values():
        layer.config = replace(layer.config, activations=None)
    with torch.no_grad():
        quantized = model(**inputs)[0]
        assert dequantize_model(model) is model
        assert not quantized_linears(model) and set(model.state_dict()) == keys
        assert type(model.transformer_blocks[0].attn.to_q) is nn.Linear and not hasattr(model, "dq_artifact")
        torch.testing.assert_close(model(**inputs)[0], quantized, rtol=1e-3, atol=1e-4)
    with pytest.raises(DQError, match="holds no quantized linear"):
        dequantize_model(model)


@pytest.mark.parametrize("name", ["transformer_blocks.0.attn.to_q.bias", "x_embedder.weight", "proj_out.bias"])
def test_nan_anywhere_is_refused(tiny, name):
    """Also in what is not quantized: the model could not be judged, and the report would say success."""
    model = tiny.flux()
    model.get_parameter(name).data.flatten()[0] = float("inf")
    with pytest.raises(DQError, match=f"^{re.escape(name)} holds 1 NaN or Inf values"):
        quantize_model(model, make_plan(model, tiny.recipe("fp8")), progress=quiet)
    assert not quantized_linears(model)


@pytest.mark.parametrize("factor", [0.0, 1e-7, 1.0, 1e30])
def test_sqnr_of_extreme_weights(tiny, factor):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight.data *= factor
    plan = make_plan(model, tiny.recipe("w4a16" if factor < 1 else "int8"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = quantize_model(model, plan, progress=quiet)
    low = [str(w.message) for w in caught if "SQNR below" in str(w.message)]
    assert bool(low) == (factor == 1e-7) and all("1 (int4/group64)" in text for text in low)
    value = report.layers[1].sqnr_db
    assert value is None if factor == 0 else math.isfinite(value) and (value > 20 or factor == 1e-7)
    assert "nan" not in str(report) and "-300" not in str(report)
