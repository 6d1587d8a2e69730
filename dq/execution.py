"""How layers run: an input that several of them get is prepared once, and `torch.compile` sees one function."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dq.linear_config import LinearConfig
from dq.ops import Choice, LinearParams, choose_backend

_LAST = threading.local()
# What was chosen for a layer while it was compiled, by its description and its mode: a compiled layer cannot note it.
COMPILED: dict[tuple[str, str], Choice] = {}


class _Shared:
    """What layers that are called with the same tensor, one after the other, have made of it.

    It ends with the tensor, with a write to it, with another stream, and as soon as a layer comes a second time: that
    is a new call of the model, before which a replayed graph may have written to the tensor unseen.
    """

    __slots__ = ("made", "reference", "stream", "users", "version")

    def __init__(self, x: Tensor, user: int, stream: int):
        self.made: dict[Any, Any] = {}
        made = self.made
        self.reference = weakref.ref(x, lambda _: made.clear())
        self.version, self.users, self.stream = x._version, {user}, stream


def shared(x: Tensor, user: int) -> dict[Any, Any] | None:
    """What other layers have already made of x, to be read and added to; None where writes to x would go unnoticed.

    Args:
        user: identity of the layer that asks.
    """
    if x.is_inference():
        return None
    last, stream = getattr(_LAST, "input", None), _stream(x)
    same = last is not None and last.reference() is x and (last.version, last.stream) == (x._version, stream)
    if same and user not in last.users:
        last.users.add(user)
        return last.made
    _LAST.input = last = _Shared(x, user, stream)
    return last.made


def _stream(x: Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0


def run(choice: Choice, x: Tensor, params: LinearParams) -> Tensor:
    """x [..., K] -> [..., N] in its dtype, by the chosen backend."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    y = choice.backend.run(rows, params)
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], y.shape[-1])


@lru_cache(maxsize=4096)
def _read(text: str) -> tuple[LinearConfig, int, int]:
    return LinearConfig.read(text)


def traced(x: Tensor, bias: Tensor | None, text: str, mode: str, names: tuple[str, ...], *tensors: Tensor) -> Tensor:
    """A layer as `torch.compile` puts it into its graph: one call, whose inside only the backend compiler sees.

    Traced line by line by Dynamo, every field of a layer would become a guard: a block of FLUX had a thousand more,
    checked at each call. Here the layer is its tensors and two texts. Sizes are symbols where they vary: `x.shape[0]`
    stays one, `len(x)` would compile anew for every number of tokens.

    Args:
        text: `LinearConfig.text` of the layer.
        mode: of activations, see `choose_backend`.
        names, tensors: its buffers.
    """
    config, rows, width = _read(text)
    params = config.params(dict(zip(names, tensors, strict=True)), bias, rows, width)
    params.fuse, params.shared = True, shared(x, id(tensors[0]))
    choice = COMPILED[text, mode] = choose_backend(params, x.device, x.dtype, mode)
    return run(choice, x, params)


@lru_cache(maxsize=1)
def allow_tracing() -> Callable[..., Tensor]:
    """Tells Dynamo about `traced`; at the first layer, since importing Dynamo takes a second or two."""
    return torch.compiler.allow_in_graph(traced)
