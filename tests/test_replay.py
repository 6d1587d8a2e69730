"""Replay by stubs: block inputs equal those of a full forward, nothing but the glue runs, everything is put back."""

import pytest
import torch
from torch import nn

from dq.family import find_family
from dq.records import Record, outputs, tensors, to_cpu
from dq.replay import Replay, call, call_order, device_of


class Chain(nn.Module):
    """Embedder, blocks in two lists, head; tensors by position and by keyword, tuples and dictionaries as outputs."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.first = nn.ModuleList(Pair() for _ in range(3))
        self.second = nn.ModuleList(Named() for _ in range(2))
        self.glue = 0

    def forward(self, x, *, scale, extra=None):
        self.glue += 1
        h, c = self.embed(x), scale * torch.ones(8)
        for block in self.first:
            h, c = block(h, context=c, settings={"gain": scale, "flag": True})
            h = h + 0.5
        out = {"h": h}
        for block in self.second:
            out = block(state=out)
        return self.head(out["h"] + c)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, h, context, settings):
        return h + self.a(h).tanh() * settings["gain"], self.b(context)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, state):
        return {"h": state["h"] + self.a(state["h"])}


class Skips(nn.Module):
    """A U-Net: late blocks read the outputs of early ones."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x):
        kept = []
        for block in self.blocks[:3]:
            x = block(x).relu()
            kept.append(x)
        for block in self.blocks[3:]:
            x = block(x + kept.pop())
        return x


def block_names(model):
    family = find_family(model)
    return [n for n, _ in model.named_modules() if n and family.block_of(n) == n]


def seen_in_full_forward(model, names, record):
    """(args, kwargs) of every block in one ordinary forward."""
    seen, handles = {}, []
    for name in names:

        def hook(module, args, kwargs, name=name):
            seen[name] = to_cpu((args, kwargs))

        handles.append(model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True))
    call(model, record.args, record.kwargs, device_of(model))
    for h in handles:
        h.remove()
    return seen


def same(a, b):
    """Equal structure, equal tensors bit for bit, equal other leaves."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a is b or a == b


def chain():
    records = [Record((torch.randn(4, 6),), {"scale": torch.tensor(s), "extra": None}) for s in (0.5, 2.0)]
    return Chain(), records


def skips():
    return Skips(), [Record((torch.randn(4, 8),), {}) for _ in range(2)]


@pytest.fixture(params=["flux", "chain", "skips"])
def case(request, tiny):
    """(model, records, whether the model reads outputs from before the predecessor)."""
    if request.param == "flux":
        return tiny.flux(), [Record((), tiny.flux_inputs(batch=2, seed=s)) for s in (0, 10)], False
    return (*{"chain": chain, "skips": skips}[request.param](), request.param == "skips")


@pytest.mark.parametrize("keep", [True, False])
def test_inputs_are_those_of_a_full_forward(case, keep):
    model, records, needs_all = case
    names = block_names(model)
    order = call_order(model, names, records[0])
    assert order == names  # here: the order of definition
    expected = [seen_in_full_forward(model, names, r) for r in records]
    replay = Replay(model, order, records, keep or needs_all)
    for name in order:
        for i in range(len(records)):
            inputs = replay.inputs(name, i)
            assert same(inputs, expected[i][name]), name
            replay.advance(name, i, inputs)


def test_the_rest_of_a_forward(case):
    """What the model gives when a block changes and those before it are stubs; going back starts over."""
    model, records, needs_all = case
    names = block_names(model)
    replay = Replay(model, names, records, needs_all)
    for name in (*names, "", *names[1:2]):
        replay.reach(name, [0, 1])
        weight = next(model.get_submodule(name).parameters())
        own = weight.detach().clone()
        weight.data.mul_(1.5)
        for i, record in enumerate(records):
            full = call(model, record.args, record.kwargs, device_of(model))
            assert same(outputs(replay.rest(name, i)), outputs(full)), name
        weight.data.copy_(own)
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_only_the_glue_runs(case):
    """No linear inside a block and nothing behind the block is called to find its input."""
    model, records, _ = case
    names = block_names(model)
    replay = Replay(model, names, records, True)
    calls = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda m, a, name=name: calls.append(name))
    for name in names:
        calls.clear()
        inputs = replay.inputs(name, 0)
        inside = [c for c in calls if any(c.startswith(n + ".") for n in names)]
        assert not inside and "head" not in calls and "proj_out" not in calls
        calls.clear()
        replay.advance(name, 0, inputs)
        assert all(c.startswith(name) for c in calls) and calls


def test_memory_is_one_output_per_list():
    model, records = chain()
    names = block_names(model)
    for keep, held in ((False, 2), (True, 5)):
        replay = Replay(model, names, records, keep)
        for name in names:
            for i in range(len(records)):
                replay.advance(name, i, replay.inputs(name, i))
        assert [len(outputs) for outputs in replay._outputs] == [held, held]
        assert all(not t.requires_grad for outputs in replay._outputs for t in tensors(outputs))


def test_advance_may_keep_nothing():
    """A first look at a block (for its statistics) must not replace what its predecessor left."""
    model, records = chain()
    names = block_names(model)
    replay = Replay(model, names, records, False)
    replay.advance(names[0], 0, replay.inputs(names[0], 0))
    before = to_cpu(replay.inputs(names[1], 0))
    replay.advance(names[1], 0, replay.inputs(names[1], 0), keep=False)
    assert same(to_cpu(replay.inputs(names[1], 0)), before)


class Repeats(nn.Module):
    def __init__(self, times):
        super().__init__()
        self.blocks, self.times = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), times

    def forward(self, x):
        for _ in range(self.times):
            for block in self.blocks[:-1] if self.times == 0 else self.blocks:
                x = block(x)
        return x


@pytest.mark.parametrize(("times", "ordered"), [(1, True), (2, False), (0, False)])
def test_blocks_called_twice_or_never_have_no_order(times, ordered):
    model = Repeats(times)
    order = call_order(model, ["blocks.0", "blocks.1"], Record((torch.randn(2, 4),), {}))
    assert order == (["blocks.0", "blocks.1"] if ordered else [])
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_order_is_that_of_the_calls():
    model = Repeats(1)
    model.blocks = nn.ModuleList(reversed(model.blocks))
    model.forward = lambda x: model.blocks[0](model.blocks[1](x))
    assert call_order(model, ["blocks.0", "blocks.1"], Record((torch.randn(2, 4),), {})) == ["blocks.1", "blocks.0"]


def test_without_an_order_the_model_is_one_block():
    model, records = chain()
    replay = Replay(model, [], records, True)
    args, kwargs = replay.inputs("", 0)
    assert args is records[0].args and kwargs is records[0].kwargs
    replay.advance("", 0, (args, kwargs))
    assert model.glue == 1 and replay._outputs == [{}, {}]


def test_forwards_are_put_back():
    """Also one that somebody else had replaced (offloading hooks do), and also after an error inside the model."""
    model, records = chain()
    names = block_names(model)
    replaced = model.get_submodule(names[1])
    original = replaced.forward
    wrapped = lambda *a, **k: original(*a, **k)  # noqa: E731
    replaced.forward = wrapped
    replay = Replay(model, names, records, True)
    for name in names[:3]:
        replay.advance(name, 0, replay.inputs(name, 0))
    model.get_submodule(names[0]).register_forward_hook(lambda m, a, out: out[0].no_such_attribute)
    with pytest.raises(AttributeError):
        replay.inputs(names[3], 0)
    for name in names:
        assert model.get_submodule(name).__dict__.get("forward") is (wrapped if name == names[1] else None)


class InPlace(nn.Module):
    """Edits what it was given, and what its blocks returned, in place."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Adds() for _ in range(3))

    def forward(self, x, mask):
        mask[mask > 0] = 2
        for block in self.blocks:
            x = block(x).mul_(mask).add_(1)
        return x


class Adds(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        return x.add_(self.a(x))


@pytest.mark.parametrize("keep", [True, False])
def test_in_place_edits_reach_neither_records_nor_later_blocks(keep):
    model, records = InPlace(), [Record((torch.randn(4, 8), torch.rand(4, 8) - 0.5), {}) for _ in range(2)]
    before = to_cpu([r.args for r in records])
    names = block_names(model)
    expected = [seen_in_full_forward(model, names, r) for r in records]
    replay = Replay(model, call_order(model, names, records[0]), records, keep)
    for name in names:
        for i in range(2):
            for _ in range(2):  # asking twice must give the same
                inputs = to_cpu(replay.inputs(name, i))
                assert same(inputs, expected[i][name]), name
            replay.advance(name, i, inputs)
    assert same([r.args for r in records], before)


def test_models_that_swallow_exceptions_are_left_all_the_same():
    class Careful(Repeats):
        def forward(self, x):
            try:
                return super().forward(x)
            except Exception:
                return x

    model = Careful(1)
    replay = Replay(model, ["blocks.0", "blocks.1"], [Record((torch.randn(2, 4),), {})], True)
    assert len(replay.inputs("blocks.0", 0)[0]) == 1


def test_control_flow_that_depends_on_values_is_reported():
    model = Repeats(1)
    replay = Replay(model, ["blocks.0", "blocks.1"], [Record((torch.randn(2, 4),), {})], True)
    model.times = 0
    with pytest.raises(RuntimeError, match=r"block blocks\.0 was not reached in a replay"):
        replay.inputs("blocks.0", 0)
