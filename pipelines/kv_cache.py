"""`KVCache`: a transformers cache that holds keys and values as packed low-bit codes.

    model.generate(**tokens, past_key_values=dq.KVCache("int4-kivi", config=model.config))   # or cache=...

Tokens of the call at hand are attended to as they come; what is attended to later is what was stored. With
`exact=False` a call attends to its own tokens as stored too: what a cache costs can then be measured in one call over a
long text (all but the newest tokens of the window are rounded, for every query). A format with a
window keeps the newest tokens in 16 bits: keys leave it 128 at a time (a group of 32 tokens shares a scale per channel,
so only whole groups can go), values one by one.
Sources: KIVI (arXiv 2402.02750, section 3.2); QuaRot (arXiv 2404.00456, section 4): keys and values are rotated by a
Hadamard matrix over head_dim before they are rounded, here rotated back when they are read, so that the model stays as
it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from dq.pipelines.kv_store import KVFormat, Store, kv_format
from dq.registry import DQError
from dq.transforms.hadamard import factors, multiply


class _Side:
    """Keys or values of one layer: a store, then the newest tokens in 16 bits."""

    def __init__(self, codec: Any, channels: bool, fmt: KVFormat):
        self.store = None if codec is None else Store(codec, channels)
        self.window, self.rotated = fmt.window, fmt.rotated
        self.recent: Tensor | None = None  # [batch, heads, tokens, head_dim]

    @property
    def length(self) -> int:
        return (self.store.length if self.store else 0) + (0 if self.recent is None else self.recent.shape[-2])

    def _stored(self, start: int, end: int) -> Tensor:
        x = self.store.read(start, end)
        x = multiply(x, x.shape[-1], inverse=True) if self.rotated else x
        return x.to(self.recent.dtype)

    def update(self, new: Tensor, exact: bool = True) -> Tensor:
        """Takes new tokens in; returns all of them, old ones as stored, new ones too unless `exact`."""
        self.recent = new if self.recent is None else torch.cat([self.recent, new], -2)
        if self.store is None:
            return self.recent
        if not exact:
            self._flush()
        whole = self.recent
        if self.store.length:
            whole = torch.cat([self._stored(0, self.store.length), whole], -2)
        if exact:
            self._flush()
        return whole

    def _flush(self) -> None:
        """Moves what is older than the window into the store."""
        n = self.recent.shape[-2]
        # Per channel a full window goes as a whole; per token it slides.
        count = n // self.window * self.window if self.store.channels else max(n - self.window, 0)
        if not count:
            return
        old = self.recent[..., :count, :]
        if self.rotated:
            old = multiply(old.to(torch.float32).contiguous(), old.shape[-1])
        self.store.append(old)
        self.recent = self.recent[..., count:, :].clone()

    def keep(self, start: int, end: int) -> None:
        """Drops tokens outside [start, end), but for older ones of a group that reaches into it. A group that is cut
        at its end goes back into the window, as it was read."""
        if self.store is None or not self.store.length:
            self.recent = self.recent[..., start:end, :].clone()
            return
        stored, unit = self.store.length, self.store.unit
        if end < stored:
            whole = end // unit * unit
            cut = self._stored(whole, whole + unit)[..., : end - whole, :] if end > whole else self.recent[..., :0, :]
            self.recent = cut.clone()
            stored = whole
        else:
            self.recent = self.recent[..., max(start - stored, 0) : end - stored, :].clone()
        self.store.keep(min(start, stored) // unit * unit, stored)

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.recent = None if self.recent is None else fn(self.recent)
        if self.store is not None:
            self.store.map(fn)

    def tensors(self) -> list[Tensor]:
        held = [] if self.recent is None else [self.recent]
        return held + (self.store.tensors() if self.store else [])


class QuantizedKVLayer(DynamicLayer):
    """One layer of `KVCache`. `keys` and `values` hold nothing: what is held is in `sides`.

    Args:
        fmt: how keys and values rest.
        sliding_window: the layer attends to that many tokens at most; older ones are dropped.
        exact: whether the tokens of a call are attended to as they come, in that call.
    """

    def __init__(self, fmt: KVFormat, sliding_window: int | None = None, exact: bool = True):
        super().__init__()
        self.fmt, self.sliding_window, self.exact, self.record_past = fmt, sliding_window, exact, False
        self.is_sliding = sliding_window is not None
        # Whether a rollback leaves no trace: what a window has given up stays rounded.
        self.is_croppable = fmt.window == 0
        self._clear()

    def _clear(self) -> None:
        fmt = self.fmt
        self.sides = (_Side(fmt.keys, fmt.channels, fmt), _Side(fmt.values, False, fmt))
        self.seen = 0  # tokens since the start, those that a sliding window dropped included

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if self.fmt.rotated:
            for x in (key_states, value_states):
                factors(x.shape[-1])
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, heads, new tokens, head_dim] in; all that the new tokens may attend to out."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = key_states.shape[-2]
        self.seen += new
        out = [side.update(x, self.exact) for side, x in zip(self.sides, (key_states, value_states), strict=True)]
        if self.is_sliding:
            out = [x[..., -(self.sliding_window - 1 + new) :, :] for x in out]
            if not self.record_past:
                self._slide()
        return out[0], out[1]

    def _slide(self) -> None:
        for side in self.sides:
            start = max(side.length - self.sliding_window + 1, 0)
            if start:
                side.keep(start, side.length)

    def activate_past_recording(self) -> None:
        """Keeps all tokens until the next `crop`, so that a sliding layer can be rolled back."""
        self.record_past = True

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return self.sliding_window if self.is_sliding else -1

    get_max_cache_shape = get_max_length  # its name in older versions

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of what the next `query_length` tokens attend to."""
        held = min(self.seen, self.sliding_window - 1) if self.is_sliding else self.seen
        return held + query_length, self.seen - held

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the newest `-tokens_to_remove` tokens; a positive number is what stays, as in older versions.

        Raises:
            DQError: a sliding layer no longer holds the tokens before them.
        """
        if not self.is_initialized:
            return
        n = tokens_to_remove
        count = min(-n, self.seen) if n <= 0 else max(self.seen - n, 0)
        needed = min(self.seen - count, self.sliding_window - 1) if self.is_sliding else 0
        if count and min(s.length for s in self.sides) - count < needed:
            raise DQError("the sliding window has dropped tokens that are needed after this crop: call "
                          "activate_past_recording() on the cache before generating")  # fmt: skip
        for side in self.sides if count else ():
            side.keep(0, side.length - count)
        self.seen -= count
        if self.is_sliding:
            self._slide()

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        for side in self.sides:
            side.map(fn)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.map(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.map(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.map(lambda t: t[indices, ...])

    def offload(self) -> None:
        self.map(lambda t: t.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized:
            self.map(lambda t: t.to(self.device, non_blocking=True))

    def reset(self) -> None:
        self._clear()
        self.is_initialized = False

    def tensors(self) -> list[Tensor]:
        """Every tensor held."""
        return [t for side in self.sides for t in side.tensors()]

    def values_held(self) -> int:
        """Elements of keys and values that these tensors stand for."""
        found = [(s.length, s.recent) for s in self.sides if s.recent is not None]
        return sum(n * r.shape[0] * r.shape[1] * r.shape[3] for n, r in found)


class KVCache(Cache):
    """A cache for `generate` and for direct calls of a decoder model, in few bits.

    Batches, left padding, beam search, `crop`, sliding-window layers (older tokens are dropped) and copies work as with
    `DynamicCache`. Layers that hold no growing keys and values (linear attention, shared ones) are transformers' own.

    Args:
        name: `16-bit`, `fp8`, `int8`, `int4`, `int4-kivi`, `int2-kivi`, `int4-quarot`, `nvfp4`, `nvfp4-rotated`, or a
            `KVFormat`.
        config: the model's configuration; without it every layer is a full-attention layer.
        exact: False to attend to the tokens of a call as they are stored, in that call already.

    Raises:
        DQError: an unknown name, a head size that no Hadamard matrix has, or a model without a layer to quantize.
    """

    def __init__(self, name: str | KVFormat = "fp8", config: Any = None, *, exact: bool = True):
        self.format, self.exact = kv_format(name), exact
        if config is None:
            super().__init__(layer_class_to_replicate=partial(QuantizedKVLayer, self.format, exact=exact))
            return
        _check_head(self.format, config)
        layers = [self._layer(own) for own in DynamicCache(config=config).layers]
        rounds = self.format.keys is not None or self.format.values is not None
        if rounds and not any(isinstance(x, QuantizedKVLayer) for x in layers):
            kinds = ", ".join(sorted({type(x).__name__ for x in layers}))
            raise DQError(f"no layer of {config.model_type} holds plain keys and values, so that {self.format.name} "
                          f"would save nothing (transformers keeps {kinds}): generate without it")  # fmt: skip
        super().__init__(layers=layers)

    def _layer(self, own: Any) -> Any:
        """transformers' own layer of a kind -> ours, where there is one."""
        if type(own) is DynamicLayer:
            return QuantizedKVLayer(self.format, exact=self.exact)
        if type(own) is DynamicSlidingWindowLayer:
            return QuantizedKVLayer(self.format, own.sliding_window, self.exact)
        return own

    def _held(self) -> Iterator[Tensor]:
        for layer in self.layers:
            if isinstance(layer, QuantizedKVLayer):
                yield from layer.tensors()
            else:
                states = [*vars(layer).values(), *getattr(layer, "conv_states", {}).values()]
                yield from (t for t in states if isinstance(t, Tensor))

    @property
    def nbytes(self) -> int:
        """Bytes held: codes, scales and the tokens that still rest in 16 bits."""
        return sum(t.numel() * t.element_size() for t in self._held())

    @property
    def bits_per_value(self) -> float:
        """Bits held per element of keys and values, over the layers that are quantized; 0 when empty."""
        layers = [x for x in self.layers if isinstance(x, QuantizedKVLayer)]
        count = sum(x.values_held() for x in layers)
        size = sum(t.numel() * t.element_size() for x in layers for t in x.tensors())
        return 8 * size / count if count else 0.0

    def __repr__(self) -> str:
        return (
            f"KVCache({self.format.name!r}, {len(self.layers)} layers, {self.get_seq_length()} tokens, "
            f"{self.nbytes} bytes)"
        )


def _check_head(fmt: KVFormat, config: Any) -> None:
    if not fmt.rotated:
        return
    text = config.get_text_config(decoder=True)
    for one in getattr(text, "per_layer_config", None) or [text]:  # layers may have heads of different sizes
        heads = getattr(one, "num_attention_heads", None)  # none in a model without attention
        size = getattr(one, "head_dim", None) or (one.hidden_size // heads if heads else None)
        if size:
            factors(size)


def cache_argument(model: Any) -> str:
    """The keyword by which a model and its `generate` take a cache: `cache`, before that `past_key_values` (which newer
    versions take too, with a warning)."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
