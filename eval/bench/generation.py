"""Time to the first token and time per token of decoder models, 16-bit and quantized, in one run.

    prefill   tokens of the prompt / seconds until its last logits are there (the time to the first token)
    decode    1 / median seconds of a step: one token in, its logits and the next token out, the prompt in the cache

On CUDA every block is one compiled function, and prompt and step are replayed from captured graphs: neither Python nor
launches count. Weights may be random: times do not depend on them, texts would.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch

WARMUP = 3


def captured(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """The call as a graph on CUDA, after a few calls that compile and settle; itself elsewhere."""
    if device.type != "cuda":
        call()
        return call
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(WARMUP):
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def seconds(call: Callable[[], Any], device: torch.device, repeat: int) -> list[float]:
    """Of each of `repeat` calls, one after the other."""
    if device.type != "cuda":
        out = []
        for _ in range(repeat):
            start = time.perf_counter()
            call()
            out.append(time.perf_counter() - start)
        return out
    call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]


def measure(decoder: Any, vocabulary: int, prompt: int, tokens: int, repeat: int = 10) -> dict[str, float]:
    """Times of one decoder with static shapes (`dq.pipelines.decoding.StaticDecoder`).

    Args:
        prompt: tokens of the prompt.
        tokens: steps that are timed behind it.
        repeat: prompts that are timed.

    Returns:
        ttft, tpot (medians, seconds), prefill and decode (tokens per second, all sequences of the batch together).
    """
    device, batch = decoder.device, decoder.batch
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (batch, prompt), generator=generator).to(device)
    ttft = statistics.median(seconds(captured(lambda: decoder.prompt(ids), device), device, repeat))
    last, at = ids[:, -1:].clone(), torch.tensor([prompt], device=device)

    def step() -> None:
        last.copy_(decoder.token(last, at).argmax(-1, keepdim=True))
        at.add_(1)

    replay = captured(step, device)
    at.fill_(prompt)
    tpot = statistics.median(seconds(replay, device, tokens))
    return {"ttft": ttft, "tpot": tpot, "prefill": batch * prompt / ttft, "decode": batch / tpot}


def text(rows: Iterable[dict[str, Any]]) -> str:
    """The rows as a table; ratios are to the first row."""
    rows = list(rows)
    first = rows[0]
    lines = [["engine", "GB", "quantize s", "prefill tokens/s", "ratio", "decode tokens/s", "ratio", "kernels"]]
    for r in rows:
        if r.get("failed"):
            lines.append([f"{r['engine']}: {r['failed']}", *[""] * 7])
            continue
        ratios = [f"{r[k] / first[k]:.2f}x" for k in ("prefill", "decode")]
        seconds = "-" if r["seconds"] is None else f"{r['seconds']:.1f}"
        lines.append([r["engine"], f"{r['gb']:.2f}", seconds, f"{r['prefill']:.0f}", ratios[0], f"{r['decode']:.1f}",
                      ratios[1], r["kernels"]])  # fmt: skip
    whole = [line for line in lines if line[1]]
    wide = [max(map(len, column)) for column in zip(*whole, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, wide)).rstrip() for line in lines)
