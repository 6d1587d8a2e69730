"""Block inputs without recomputation, for any model whose forward calls its blocks once each.

To get the inputs of block i, the model's own forward runs with the blocks before i replaced by stubs that return what
they returned earlier, and stops when it reaches block i. Only the glue between blocks and the embedders run again, and
nothing has to be known about the signature of a block.
"""

from __future__ import annotations

from contextlib import contextmanager
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


def call_order(model: nn.Module, blocks: list[str], record: Record) -> list[str]:
    """The blocks in the order in which one forward of record 0 calls them; [] if one is called twice or never."""
    order: list[str] = []
    handles = [model.get_submodule(b).register_forward_pre_hook(lambda m, a, _b=b: order.append(_b)) for b in blocks]
    try:
        with running(0, model):
            call(model, record.args, record.kwargs, device_of(model))
    finally:
        for h in handles:
            h.remove()
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
        with self._stubbed(block, self._outputs[index]):
            try:
                call(self.model, record.args, record.kwargs, self.device)
            except _Reached as reached:
                return reached.call
        raise RuntimeError(f"block {block} was not reached in a replay; its model's control flow depends on values")

    @contextmanager
    def _stubbed(self, block: str, outputs: dict[str, Any]):
        def stop(*args, **kwargs):
            raise _Reached(args, kwargs)

        position, saved = self.order.index(block), []
        for i, name in enumerate(self.order[: position + 1]):
            module = self.model.get_submodule(name)
            saved.append((module, module.__dict__.get("forward")))
            if i == position:
                module.forward = stop
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
