"""`auto` recipes: the knapsack against brute force, scores on inputs held out, and whole models."""

import io
import itertools
import re
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from tqdm import tqdm

import dq
from dq.auto import Choice, ChoiceTable, Score, allocate, choose, score_row
from dq.linear import quantized_linears
from dq.planning import make_plan
from dq.recipe import Auto, Candidate, Recipe, Target
from dq.registry import DQError
from dq.stats import Stat

W4 = dict(weights="int4/channel", activations="int4/token")
W8 = dict(weights="int8/channel", activations="int8/token")


def recipe(*candidates, **auto) -> Recipe:
    """Candidates as (name, target) pairs; by default 4 and 8 bits."""
    candidates = candidates or (("w4", W4), ("w8", W8))
    table = dict(candidates=[dict(name=n, **t) for n, t in candidates], **auto)
    return Recipe.from_dict(dict(name="auto", auto=table, min_features=16))


def best_by_force(options, budget):
    """Least cost over all combinations that fit."""
    fits = [c for c in itertools.product(*options) if sum(s for _, s in c) <= budget]
    return min(sum(cost for cost, _ in c) for c in fits)


GROUP = st.lists(st.tuples(st.integers(0, 1000).map(float), st.integers(1, 300)), min_size=1, max_size=4)


@given(options=st.lists(GROUP, min_size=1, max_size=5), share=st.floats(0, 1))
def test_knapsack_is_the_best_there_is(options, share):
    """Below 4096 bytes of play a bin is a byte: exact, and never over budget."""
    low, high = (sum(f(s for _, s in g) for g in options) for f in (min, max))
    budget = low + int(share * (high - low))
    taken = allocate(options, budget)
    found = [g[i] for g, i in zip(options, taken, strict=True)]
    assert sum(s for _, s in found) <= budget
    assert sum(c for c, _ in found) == pytest.approx(best_by_force(options, budget))


@given(
    options=st.lists(GROUP, min_size=1, max_size=5), share=st.floats(0, 1), scale=st.sampled_from((10**4, 10**6, 10**9))
)
def test_knapsack_of_large_groups(options, share, scale):
    """With bins of many bytes: never over budget, and no worse than the best of a budget smaller by a bin per group."""
    options = [[(c, s * scale + i) for i, (c, s) in enumerate(g)] for g in options]
    low, high = (sum(f(s for _, s in g) for g in options) for f in (min, max))
    budget = low + int(share * (high - low))
    found = [g[i] for g, i in zip(options, allocate(options, budget), strict=True)]
    assert sum(s for _, s in found) <= budget
    less = budget - (len(options) + 1) * (1 + (budget - low) // 4096)
    assert less < low or sum(c for c, _ in found) <= best_by_force(options, less) + 1e-9


def test_a_budget_of_few_bytes_is_kept():
    assert allocate([[(1.0, 100), (0.0, 200)]], 110) == [0]
    assert allocate([[(1.0, 100), (0.0, 200)]], 200) == [1]
    assert allocate([[(1.0, 7), (0.5, 8)], [(1.0, 7), (0.4, 8)]], 15) == [0, 1]
    assert allocate([[(1.0, 7)], [(1.0, 7), (0.4, 7)]], 14) == [0, 1]  # no byte to spare, still the better one
    assert allocate([], 0) == []


def test_the_whole_budget_can_be_spent():
    """What all first candidates need together buys all first candidates, though no bin holds one exactly."""
    options = [[(1.0, 100_000), (0.0, 200_001)]] * 300
    assert allocate(options, 300 * 200_001) == [1] * 300


def test_impossible_budgets_are_refused():
    with pytest.raises(DQError, match="the smallest candidates need 30 bytes, the budget is 29: raise bits"):
        allocate([[(1.0, 10), (0.0, 50)], [(0.0, 20)]], 29)


def test_v8():
    """V8: sensitivities at 4 and 8 bits, parameters, 4.5 bits on average. Greedy: C, A, B, D; C alone gets 8 bits."""
    v8 = {"A": (0.8, 0.10, 100), "B": (0.3, 0.02, 400), "C": (2.0, 0.05, 50), "D": (0.05, 0.01, 450)}
    options = [[(s4, 4 * n), (s8, 8 * n)] for s4, s8, n in v8.values()]
    taken = allocate(options, int(4.5 * 1000))
    assert dict(zip(v8, taken, strict=True)) == {"A": 0, "B": 0, "C": 1, "D": 0}
    assert sum(o[i][1] for o, i in zip(options, taken, strict=True)) / 1000 == 4.2
    gain = {k: (s4 - s8) / (4 * n) for k, (s4, s8, n) in v8.items()}
    assert sorted(gain, key=gain.get, reverse=True) == ["C", "A", "B", "D"]
    assert [round(g, 8) for g in gain.values()] == pytest.approx([0.00175, 0.000175, 0.00975, 2.222e-5], rel=1e-4)
    # 100 bits more, and A takes 8 bits as well: 4600 in all.
    assert allocate(options, 4600) == [1, 0, 1, 0]


def rows_of(count=3, r=None):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(count)))
    return make_plan(model, r or recipe()).quantized


def test_choose():
    """Cost is sensitivity times error; the budget counts all rows; refused candidates are never taken."""
    rows, auto = rows_of(), recipe(bits=6.0).auto
    scores = [(Score("w4", e, 2048 + 256), Score("w8", e / 100, 4096 + 256)) for e in (0.1, 0.2, 0.1)]
    taken, table = choose(rows, scores, [1.0, 1.0, 5.0], auto)
    assert [c.winner for c in table] == ["w4", "w4", "w8"]  # 6 bits of 3 x 4096 weights are 9216 bytes
    assert [r.target for r in taken] == [auto.candidates[i].target for i in (0, 0, 1)]
    assert [r.members for r in taken] == [r.members for r in rows]
    refused = [*scores[:2], (Score("w4", 0.1, 2304), Score("w8", reason="does not fit"))]
    assert [c.winner for c in choose(rows, refused, [1.0, 1.0, 5.0], auto)[1]] == ["w4", "w8", "w4"]
    with pytest.raises(DQError, match="raise bits"):
        choose(rows, scores, [1.0] * 3, replace(auto, bits=4.0))


@pytest.mark.parametrize(
    ("bits", "extra", "winners"), [(0, 0, 0), (0, 1.4, 1), (0, 4.0, 3), (8.5, 0, 3), (4.5, 1.4, 1)]
)
def test_budget(bits, extra, winners):
    """`bits` per weight, or what the first candidate needs; `extra_bits` on top."""
    rows = rows_of()
    scores = [(Score("w4", 0.1, 2048 + 256), Score("w8", 0.001, 4096 + 256))] * 3
    _, table = choose(rows, scores, [1.0] * 3, recipe(bits=float(bits), extra_bits=extra).auto)
    assert sum(c.winner == "w8" for c in table) == winners
    assert sum(c.score().nbytes for c in table) <= (bits or 4.5) * 3 * 512 + extra * 3 * 512


def test_table():
    """What won where, by how much, and what the whole needs."""
    scores = (Score("w4", 0.10, 2304), Score("w8", 0.001, 4352), Score("odd", reason="no whole groups"))
    table = ChoiceTable(
        [
            Choice(("a.q", "a.k"), 4096, scores, "w8", 30.0),
            Choice(("b",), 4096, (Score("w4", 0.01, 2304), Score("w8", 0.002, 4352, "screened out")), "w4", 7.0),
        ]
    )
    lines = str(table).splitlines()
    cells = [re.split(r"\s{2,}", line) for line in lines]
    assert cells[0] == ["group", "taken", "bits", "error", "of first", "model share", "runner-up"]
    assert cells[1] == ["a.q +1", "w8", "8.50", "1.00e-03", "0.01x", "30.0 %", "w4 100.00x at 4.50 bits"]
    assert cells[2] == ["b", "w4", "4.50", "1.00e-02", "1.00x", "70.0 %", "-"]
    assert lines[-1] == "2 groups, 6.500 bits per weight"
    assert table[0].score().candidate == "w8" and table[0].score("w4").error == 0.10


def scored(x, held, r=None, weight=None):
    """Scores of one linear [32, 64] whose statistics saw x, and whose errors are measured on `held`."""
    r = r or recipe()
    model = nn.Sequential(nn.Linear(64, 32))
    if weight is not None:
        model[0].weight.data = weight
    stat = Stat(64, want_gram=r.auto.needs_gram)
    stat.update(x)
    if held is not None:
        stat.update(held, held_out=True)
    with torch.no_grad():
        return model, *score_row(model, make_plan(model, r).quantized[0], {"0": stat}, r.auto)


def test_errors_are_those_of_held_out_inputs():
    x, held = torch.randn(200, 64), torch.randn(50, 64) * torch.linspace(0.1, 5, 64)
    model, scores, kept = scored(x, held)
    layer, y = kept["w4"]["0"], model[0](held).detach()
    error = float((layer(held) - y).square().sum() / (y - model[0].bias).square().sum())
    assert scores[0].error == pytest.approx(error, rel=1e-4)
    assert scores[0].error != pytest.approx(scored(x, None)[1][0].error, rel=1e-2)
    assert [s.candidate for s in scores] == ["w4", "w8"] and scores[1].error < 0.02 * scores[0].error
    assert scores[0].nbytes == 64 * 32 // 2 + 4 * 32 and scores[1].nbytes == 64 * 32 + 4 * 32


def test_held_out_inputs_enter_no_statistics():
    """Layers fitted beside any held-out inputs are the same, bit for bit."""
    x = torch.randn(100, 64) * torch.linspace(0.1, 5, 64)
    target = dict(weights="nvfp4@weighted_sweep", activations="nvfp4-token", rounding="gptq")
    target["transforms"] = [{"name": "smooth", "search": True}, {"name": "arc", "channels": 16}]
    states = []
    for factor in (1.0, 100.0):
        torch.manual_seed(1)
        weight = torch.ones(32, 64).cumsum(1).sin()
        _, _, kept = scored(x, factor * torch.randn(60, 64), recipe(("one", target)), weight)
        states.append(kept["one"]["0"].state_dict())
    assert states[0].keys() == states[1].keys()
    for key in states[0].keys() - {"bias"}:
        assert torch.equal(states[0][key].view(torch.uint8), states[1][key].view(torch.uint8)), key


def test_screening_and_refusal():
    """A candidate far behind one that is not larger is rounded no further; one that cannot be fitted says why."""
    arc = dict(weights="nvfp4", activations="nvfp4-token", transforms=[{"name": "arc", "channels": 80}])
    poor = dict(weights="int2/channel", activations="int2/token")
    r = recipe(("w4", W4), ("w8", W8), ("arc", arc), ("poor", poor), ("poor8", dict(W8, activations="int2/token")))
    _, scores, _ = scored(torch.randn(200, 64), None, r)
    found = {s.candidate: s for s in scores}
    assert "do not fit the input width 64" in found["arc"].reason
    assert found["poor8"].reason == "screened out" and found["poor8"].error > 2 * found["w8"].error
    # The smallest one is never screened out: nothing else might fit the budget.
    assert [n for n, s in found.items() if not s.reason] == ["w4", "w8", "poor"]
    with pytest.raises(DQError, match=r"0: no candidate fits: arc: .*do not fit"):
        scored(torch.randn(200, 64), None, recipe(("w4", W4), ("arc", arc)).with_(auto=Auto((r.auto.candidates[2],))))


class Block(nn.Module):
    """A residual block; `gain` multiplies what `down` reads, channel by channel."""

    def __init__(self, width=32):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("gain", torch.ones(2 * width))

    def forward(self, x):
        return x + self.down(self.up(x).relu() * self.gain)


class Chain(nn.Module):
    def __init__(self, depth=4, bad=None):
        super().__init__()
        self.blocks, self.last = nn.ModuleList(Block() for _ in range(depth)), nn.Linear(32, 32)
        if bad is not None:  # two huge channels that matter no more than any other, but spoil a grid per token
            block = self.blocks[bad]
            block.gain[[3, 40]] = 300.0
            block.down.weight.data[:, [3, 40]] /= 300.0

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def calls(count=8):
    return [dict(x=torch.randn(20, 32, generator=torch.Generator().manual_seed(s))) for s in range(count)]


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("bad", [0, 2, 3])
def test_F30_a_planted_bad_layer_is_found(bad, rounds):
    """It ranks first by what its quantization costs the model, and gets the 8 bits that there are for one layer."""
    model, name = Chain(bad=bad), f"blocks.{bad}.down"
    r = recipe(extra_bits=0.55, rounds=rounds)  # of 18432 weights: 4 more bits for one linear of 2048
    report = dq.quantize(model, r, calibration=calls(), progress=False)
    cost = {c.members[0]: c.sensitivity * c.score("w4").error for c in report.choices}
    assert max(cost, key=cost.get) == name and cost[name] > 1.5 * sorted(cost.values())[-2]
    assert [c.members[0] for c in report.choices if c.winner == "w8"] == [name]
    assert model.get_submodule(name).config.weights.format == "int8"
    assert all(m.config.weights.format == "int4" for n, m in quantized_linears(model).items() if n != name)


def test_rules_skips_and_the_plan():
    """Only ordinary linears are up for choice; the plan of the report says what each group took."""
    model = Chain()
    rules = [dict(match="blocks.1.up", weights="fp8_e4m3/channel"), dict(match="blocks.1.down", keep="mine")]
    r = Recipe.from_dict(recipe(extra_bits=1.0).to_dict() | {"rules": rules})
    report = dq.quantize(model, r, calibration=calls(), skip=["blocks.2.up"], progress=False)
    chosen = {m: c.winner for c in report.choices for m in c.members}
    assert not {"blocks.1.up", "blocks.1.down", "blocks.2.up"} & set(chosen)
    targets = {c.name: c.target for c in r.auto.candidates}
    plan = {m: row for row in report.plan.rows for m in row.members}
    for name, winner in chosen.items():
        assert plan[name].target == targets[winner]
        assert model.get_submodule(name).config.weights == targets[winner].weights
    assert plan["blocks.1.up"].target.weights.format == "fp8_e4m3" and plan["blocks.1.down"].reason == "mine"
    assert {"w4", "w8"} == set(chosen.values())
    assert not isinstance(model.blocks[1].down, dq.QuantizedLinear) and type(model.blocks[2].up) is nn.Linear
    assert model.dq_artifact["recipe"]["name"] == "auto"


def test_a_rule_that_repeats_a_candidate_is_still_a_rule():
    """The first candidate written out for one layer fixes it there, whatever the budget would buy."""
    model = Chain()
    r = Recipe.from_dict(recipe(bits=8.6).to_dict() | {"rules": [dict(match="blocks.1.up", **W4)]})
    report = dq.quantize(model, r, calibration=calls(), progress=False)
    assert model.blocks[1].up.config.weights.format == "int4"
    assert model.blocks[1].down.config.weights.format == "int8"
    assert "blocks.1.up" not in {m for c in report.choices for m in c.members}


class Attention(nn.Module):
    """Linears that look like one group by name; to_k reads something else."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        return self.to_q(x) + self.to_k(x + 1) + self.to_v(x.clone())


@pytest.mark.parametrize("rounds", [1, 2])
def test_groups_that_share_no_input_choose_apart(rounds, tmp_path):
    """Split once, in the survey; also from a resume folder, which remembers what was chosen."""
    r, found = recipe(extra_bits=1.5, rounds=rounds), []
    for folder in (None, tmp_path / "x", tmp_path / "x"):
        torch.manual_seed(0)
        model = nn.Sequential()
        model.blocks = nn.ModuleList(Attention() for _ in range(2))
        model.forward = lambda x, model=model: model.blocks[1](model.blocks[0](x))
        records = [dict(x=torch.randn(6, 32)) for _ in range(4)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = dq.quantize(model, r, calibration=records, resume=folder, progress=False)
        pieces = [(f"blocks.{i}.{n}",) + m for i in (0, 1) for n, m in (("to_q", (f"blocks.{i}.to_v",)), ("to_k", ()))]
        assert [x.members for x in report.plan.rows] == [c.members for c in report.choices] == pieces
        assert sum("treated apart" in r for r in report.plan.remarks) == 2
        found.append((str(report.choices), [t.float() for t in model.state_dict().values()]))
    assert found[0][0] == found[1][0] == found[2][0]
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0][1], other[1], strict=True))


@pytest.mark.parametrize(("records", "auto"), [(1, {}), (3, {}), (4, {}), (9, dict(records=1)), (20, dict(rounds=2))])
def test_progress_counts_to_its_total(records, auto, tmp_path):
    """However many records are held out, and when the outcome comes from a resume folder."""
    r = Recipe.from_dict(recipe(extra_bits=0.5, **auto).to_dict() | {"rules": [dict(match="last", **W8)]})
    for _ in range(2):
        torch.manual_seed(0)
        bars = []

        def bar(*args, bars=bars, **kwargs):
            bars.append(tqdm(*args, **kwargs, file=io.StringIO()))
            return bars[-1]

        dq.quantize(Chain(depth=2, bad=0), r, calibration=calls(records), resume=tmp_path, progress=bar)
        assert bars[0].n == bars[0].total > 0


def test_recipes_round_trip_and_are_checked():
    r = recipe(bits=5.0, rounds=2)
    assert Recipe.from_dict(r.to_dict()) == r and r.needs_calibration
    assert r.linear == r.auto.candidates[0].target
    target = Target.from_dict(W4)
    for bad in ((), (Candidate("a", target), Candidate("a", target))):
        with pytest.raises(DQError, match="each with a name of its own"):
            Auto(bad)
    for words in (dict(screen=0.5), dict(records=0), dict(rounds=0), dict(bits=-1.0)):
        with pytest.raises(DQError, match="auto takes finite bits of at least 0"):
            recipe(**words)
    with pytest.raises(DQError, match=r"unknown word 'budget' in \[auto\]"):
        recipe(budget=5.0)
    with pytest.raises(DQError, match="needs calibration"):
        dq.quantize(Chain(), r, progress=False)


@pytest.fixture(scope="module")
def flux(tiny):
    """Two runs of the preset on a tiny FLUX.1: [(model, report), ...], the 16-bit model, and its inputs."""
    records, runs = [tiny.flux_inputs(seed=s) for s in range(4)], []
    for _ in range(2):
        model = tiny.flux(num_layers=1, num_single_layers=1)
        runs.append((model, dq.quantize(model, tiny.recipe("w4a4-auto"), calibration=records, progress=False)))
    return runs, tiny.flux(num_layers=1, num_single_layers=1), tiny.flux_inputs(batch=2, seed=9)


def test_the_preset_is_deterministic(flux):
    (a, first), (b, second) = flux[0]
    assert str(first.choices) == str(second.choices) and first.plan == second.plan
    one, two = a.state_dict(), b.state_dict()
    assert one.keys() == two.keys()
    assert all(torch.equal(v.view(torch.uint8), two[k].view(torch.uint8)) for k, v in one.items())


def test_the_preset_keeps_its_budget(flux, tiny):
    """No more bytes than its first candidate alone would need; the plan and the layers agree on them."""
    report, recipe_ = flux[0][0][1], tiny.recipe("w4a4-auto")
    first = recipe_.auto.candidates[0]
    alone = make_plan(flux[1], recipe_.with_(auto=None, linear=first.target))
    assert report.plan.bytes_after <= alone.bytes_after
    assert sum(r.nbytes for r in report.plan.quantized) >= sum(x.nbytes for x in report.layers)
    assert sum(c.score().nbytes for c in report.choices) <= sum(c.scores[0].nbytes for c in report.choices)
    members = {m for c in report.choices for m in c.members}
    layers = {x.name: x.nbytes for x in report.layers}
    assert sum(layers[m] for m in members) <= sum(c.score().nbytes for c in report.choices)


def test_the_preset_records_winners_and_spares_the_rest(flux, tiny):
    (model, report), recipe_ = flux[0][0], tiny.recipe("w4a4-auto")
    targets = {c.name: c.target for c in recipe_.auto.candidates}
    rows = {m: r for r in report.plan.rows for m in r.members}
    for choice in report.choices:
        assert {rows[m].target for m in choice.members} == {targets[choice.winner]}
        assert [s.candidate for s in choice.scores] == list(targets)
        assert str(targets[choice.winner].weights) == str(model.get_submodule(choice.members[0]).config.weights)
    chosen = {m for c in report.choices for m in c.members}
    modulation = {m for m, r in rows.items() if r.target == recipe_.modulation}
    assert modulation and not modulation & chosen and all("norm" in m for m in modulation)
    assert chosen | modulation == set(quantized_linears(model))
    source, now = flux[1].state_dict(), model.state_dict()
    assert all(
        torch.equal(now[k], v) for k, v in source.items() if k.rpartition(".")[0] not in quantized_linears(model)
    )


def test_the_preset_runs(flux):
    (model, _), inputs = flux[0][0], flux[2]
    with torch.no_grad():
        y, reference = model(**inputs)[0], flux[1](**inputs)[0]
    assert 0 < (y - reference).norm() < 0.3 * reference.norm()
