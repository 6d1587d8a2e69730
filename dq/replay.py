"""Block inputs without recomputation, for any model whose forward calls its blocks once each.

To get the inputs of block i, the model's own forward runs with the blocks before i replaced by stubs that return what
they returned earlier, and stops when it reaches block i. Only the glue between blocks and the embedders run again, and
nothing has to be known about the signature of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dq.records import Record, map_tensors, running, to_cpu


class _Reached(BaseException):
    """Raised inside the model to leave its forward; a BaseException so that no `except Exception` swallows it."""

    def __init__(self, args: tuple, kwargs: dict):
        self.call = (args, kwargs)


def device_of(model: nn.Module) -> torch.device:
    """Where the model's first parameter or buffer lives."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def call(module: nn.Module, args: tuple, kwargs: dict, device: torch.device) -> Any:
    """`module(*args, **kwargs)` without gradients, on copies: in-place edits by a model spoil no record."""

    def copy(t: Tensor) -> Tensor:
        return t.to(device, copy=True)

    with torch.no_grad():
        return module(*map_tensors(args, copy), **map_tensors(kwargs, copy))


def called(model: nn.Module, names: Sequence[str], run: Callable[[], Any]) -> list[str]:
    """The modules that `run` calls, in their order, as often as it calls them."""
    order: list[str] = []
    handles = [model.get_submodule(n).register_forward_pre_hook(lambda m, a, _n=n: order.append(_n)) for n in names]
    try:
        with running(0, model):
            run()
    finally:
        for h in handles:
            h.remove()
    return order


def call_order(model: nn.Module, blocks: list[str], record: Record) -> list[str]:
    """The blocks in the order in which one forward of record 0 calls them; [] if one is called twice or never."""
    order = called(model, blocks, lambda: call(model, record.args, record.kwargs, device_of(model)))
    return order if sorted(order) == sorted(blocks) else []


class Replay:
    """Steps through the blocks of a model over a fixed set of records.

    Args:
        order: block names in call order; empty means that the whole model is one block.
        keep_outputs: whether a block may read outputs from before its predecessor (then all are kept; otherwise the
            last one of each ModuleList).
    """

    def __init__(self, model: nn.Module, order: list[str], records: list[Record], keep_outputs: bool):
        self.model, self.order, self.records, self.keep = model, order, records, keep_outputs
        self.device = device_of(model)
        self._outputs: list[dict[str, Any]] = [{} for _ in records]
        self._reached = 0  # the block that `reach` stands before

    def fresh(self) -> Replay:
        """The same, back at the first block."""
        return Replay(self.model, self.order, self.records, self.keep)

    def _key(self, block: str) -> str:
        return block if self.keep else block.rpartition(".")[0]

    def inputs(self, block: str, index: int) -> tuple[tuple, dict]:
        """(args, kwargs) with which record `index` reaches `block`; predecessors must have been advanced."""
        record = self.records[index]
        if not self.order:
            return record.args, record.kwargs
        with self._stubbed(block, self._outputs[index], stop=True):
            try:
                call(self.model, record.args, record.kwargs, self.device)
            except _Reached as reached:
                return reached.call
        raise RuntimeError(f"block {block} was not reached in a replay; its model's control flow depends on values")

    def reach(self, block: str, indices: Sequence[int]) -> None:
        """Brings these records before `block` through its predecessors as they are now, on from the last call; a block
        before that one, or "", starts over."""
        at = self.order.index(block) if block in self.order else 0
        for name in self.order[self._reached if self._reached <= at else 0 : at]:
            for i in indices:
                self.advance(name, i, self.inputs(name, i))
        self._reached = at

    def rest(self, block: str, index: int) -> Any:
        """What the model gives for record `index`, `block` and those behind it really run; its predecessors must have
        been advanced. Without an order, or with "" for a block, the whole model runs."""
        record, known = self.records[index], self._outputs[index]
        with self._stubbed(block, known, stop=False) if block and self.order else nullcontext():
            return call(self.model, record.args, record.kwargs, self.device)

    @contextmanager
    def _stubbed(self, block: str, outputs: dict[str, Any], stop: bool):
        """Blocks before this one give what they gave; with `stop`, reaching it leaves the forward."""

        def reached(*args, **kwargs):
            raise _Reached(args, kwargs)

        position, saved = self.order.index(block), []
        for i, name in enumerate(self.order[: position + stop]):
            module = self.model.get_submodule(name)
            saved.append((module, module.__dict__.get("forward")))
            if i == position:
                module.forward = reached
            else:
                value = map_tensors(outputs[self._key(name)], lambda t: t.to(self.device, copy=True))
                module.forward = lambda *a, _value=value, **k: _value
        try:
            yield
        finally:
            for module, forward in saved:
                if forward is None:
                    del module.__dict__["forward"]
                else:
                    module.forward = forward

    def advance(self, block: str, index: int, inputs: tuple[tuple, dict], keep: bool = True) -> None:
        """Runs the block on its inputs (hooks on its linears see them) and keeps its output for the next ones."""
        module = self.model.get_submodule(block) if self.order else self.model
        output = call(module, *inputs, self.device)
        if self.order and keep:
            self._outputs[index][self._key(block)] = to_cpu(output)
