"""How fast a language model answers, and what memory that takes: greedy decoding, one token at a time.

    TTFT        seconds from the call to the first token: the prompt of P tokens in one pass
    TPOT        seconds per further token: the time of N - 1 passes of one token, over N - 1
    throughput  B N / (TTFT + (N - 1) TPOT), tokens per second over the whole batch of B

Medians over repeats, after one that does not count. Tokens are forced through the model without a stop token, so that
every model does the same work. `torch.compile` and CUDA graphs are the caller's: a compiled model is measured as it is.
"""

from __future__ import annotations

import inspect
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dq import checks
from dq.pipelines.kv_cache import KVCache, cache_argument
from dq.registry import DQError


@dataclass(frozen=True)
class GenerationSpeed:
    """One measurement.

    Attributes:
        ttft, tpot: seconds.
        tokens_per_s: of the whole batch, prompt pass included.
        weight_bytes: of all parameters and buffers.
        cache_bytes: of keys and values after the last token.
        peak_bytes: largest memory of the device during the run; None on a CPU, where torch keeps no account.
        prompt, new, batch: P, N, B.
        cache: name of the KV cache.
    """

    ttft: float
    tpot: float
    tokens_per_s: float
    weight_bytes: int
    cache_bytes: int
    peak_bytes: int | None
    prompt: int
    new: int
    batch: int
    cache: str

    def numbers(self) -> dict[str, float]:
        """By names with units, for tables."""
        found = {
            "ttft[ms]": 1e3 * self.ttft, "tpot[ms]": 1e3 * self.tpot, "tokens/s": self.tokens_per_s,
            "weights[MB]": self.weight_bytes / 1e6, "cache[MB]": self.cache_bytes / 1e6,
        }  # fmt: skip
        return found if self.peak_bytes is None else found | {"peak[MB]": self.peak_bytes / 1e6}

    def __str__(self) -> str:
        peak = "" if self.peak_bytes is None else f", peak {self.peak_bytes / 1e9:.2f} GB"
        return (
            f"batch {self.batch}, {self.prompt} + {self.new} tokens: TTFT {1e3 * self.ttft:.1f} ms, "
            f"TPOT {1e3 * self.tpot:.2f} ms, {self.tokens_per_s:.1f} tokens/s; "
            f"weights {self.weight_bytes / 1e6:.1f} MB, {self.cache} cache {self.cache_bytes / 1e6:.2f} MB{peak}"
        )


def measure_generation(
    model: nn.Module,
    *,
    prompt: int | Tensor = 512,
    new: int = 64,
    batch: int = 1,
    kv_cache: str | None = None,
    repeat: int = 3,
    seed: int = 0,
) -> GenerationSpeed:
    """Times greedy generation on the device that the model is on.

    Args:
        prompt: length of a random prompt, or token ids [B, P].
        new: tokens to generate, at least 2.
        batch: B, of a random prompt.
        kv_cache: name of a `dq.KVCache`; None for transformers' own.
        repeat: runs, the median counts.

    Raises:
        DQError: no model with logits and a cache, ids that it does not know, or a number out of range.
    """
    new, repeat = checks.whole(new, "new", 2), checks.whole(repeat, "repeat")
    if not isinstance(model, nn.Module) or not hasattr(getattr(model, "config", None), "get_text_config"):
        raise DQError(f"measure_generation takes a language model of transformers, got {type(model).__name__}")
    words, device = model.config.get_text_config(decoder=True).vocab_size, next(model.parameters()).device
    if isinstance(prompt, Tensor):
        if prompt.dim() != 2 or prompt.is_floating_point() or not 0 <= int(prompt.min()) <= int(prompt.max()) < words:
            raise DQError(f"prompt is a length, or token ids [B, P] below {words}; got a {tuple(prompt.shape)} tensor")
        ids = prompt
    else:
        shape = checks.whole(batch, "batch"), checks.whole(prompt, "prompt")
        ids = torch.randint(0, words, shape, generator=torch.Generator().manual_seed(checks.seed(seed)))
    ids = ids.to(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    runs = [_run(model, ids, new, kv_cache, device) for _ in range(repeat + 1)][1:]
    first, rest = (statistics.median(r[i] for r in runs) for i in (0, 1))
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    rate = ids.shape[0] * new / (first + rest)
    held = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    return GenerationSpeed(
        first, rest / (new - 1), rate, held, runs[-1][2], peak, ids.shape[1], new, ids.shape[0],
        kv_cache or "16-bit",
    )  # fmt: skip


@torch.no_grad()
def _run(model: nn.Module, ids: Tensor, new: int, name: str | None, device: torch.device) -> tuple[float, float, int]:
    """Seconds to the first token, seconds of the others, bytes of the cache."""
    cache = KVCache(name or "16-bit", config=model.config)
    given = {cache_argument(model): cache, "use_cache": True}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        given["logits_to_keep"] = 1  # as `generate` does it
    marks = [_now(device)]
    token = _next(model(input_ids=ids, **given))
    marks.append(_now(device))
    for _ in range(new - 1):
        token = _next(model(input_ids=token, **given))
    marks.append(_now(device))
    return marks[1] - marks[0], marks[2] - marks[1], cache.nbytes


def _next(output: Any) -> Tensor:
    """[B, 1], the likeliest token of each row."""
    return output.logits[:, -1].argmax(-1, keepdim=True)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
