"""Quantized linears against 16-bit ones: time and error of every engine on the shapes of real models, in one run.

    ratio   time of BF16 cuBLAS / time, the median over rounds; +- half the distance of its quartiles
    limit   max(2 M N K / rate of the unit, bytes that must move / copy bandwidth) / time
    error   ||y - y64|| / ||y64||, y64 in float64 from the dequantized operands on the activation grid that ran
    layer   the same against the 16-bit layer's own float64 result

Rates (8192^3 products) and bandwidth are measured in the same run. On CUDA an engine runs from a captured graph over
several copies of its weights, more than an L2 holds, so neither launches nor warm caches count. The graphs of a shape
are replayed in turns, in another order every round, so that a chip that grows hot slows all of them. Times of dq and
torchao include the quantization of activations; "alone" marks products that do not.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dq.eval.bench.generation import seconds
from dq.eval.bench.others import PEERS, others, peers
from dq.eval.bench.speed import copy_bandwidth
from dq.eval.environment import describe
from dq.linear import QuantizedLinear
from dq.ops import Choice, LinearParams, choose_backend
from dq.qtensor import fake_quantize, quantize
from dq.registry import DQError, suggest
from dq.spec import QuantSpec
from dq.transforms import Step, apply_steps
from dq.transforms.rotate import group_size

# model -> (M, ((K, N), ...)): a 1024 px image (FLUX.1, Qwen-Image), an 81-frame 480p video, a prompt, a token
SHAPES: dict[str, tuple[int, tuple[tuple[int, int], ...]]] = {
    "flux": (4608, ((3072, 3072), (3072, 9216), (3072, 12288), (12288, 3072), (3072, 21504), (15360, 3072))),
    "qwen-image": (4352, ((3072, 3072), (3072, 12288), (12288, 3072))),
    "wan": (32760, ((5120, 5120), (5120, 13824), (13824, 5120))),
    "llama-prefill": (2048, ((4096, 4096), (4096, 14336), (14336, 4096))),
    "llama-decode": (1, ((4096, 6144), (4096, 4096), (4096, 14336), (14336, 4096))),
}
# name -> (weights, activations, transforms, low rank, activations mode)
ENGINES: dict[str, tuple[str, str | None, tuple[str, ...], int, str]] = {
    "fp8": ("fp8_e4m3/channel", "fp8_e4m3/token", (), 0, "native"),
    "int8": ("int8/channel", "int8/token", (), 0, "native"),
    "w4a4-int4": ("int4/channel", "int4/token", (), 0, "native"),
    "w4a4-int4-convrot": ("int4/channel", "int4/token", ("rotate",), 0, "native"),
    "w4a4-int4-svd": ("int4/group64", "int4/group64/fp32", ("smooth",), 32, "native"),
    "w4a4-nvfp4": ("nvfp4", "nvfp4-token", (), 0, "native"),
    "w4a4-nvfp4 rotated": ("nvfp4", "nvfp4-token", ("rotate",), 0, "native"),
    "w4a4-nvfp4-svd": ("nvfp4", "nvfp4-token", ("smooth",), 32, "native"),
    "w4a4-mxfp4": ("mxfp4", "mxfp4", (), 0, "native"),
    "w4a4-int4 faithful": ("int4/channel", "int4/token", (), 0, "faithful"),
    "w4a4-int4-svd faithful": ("int4/group64", "int4/group64/fp32", ("smooth",), 32, "faithful"),
    "w4a4-nvfp4 faithful": ("nvfp4", "nvfp4-token", (), 0, "faithful"),
    "fp8-block": ("fp8-block", "fp8-block-token", (), 0, "native"),
    "w4a16 g64": ("int4/group64", None, (), 0, "native"),
    "w4a16 g128": ("int4/group128", None, (), 0, "native"),
    "w4a16 nvfp4": ("nvfp4", None, (), 0, "native"),
    "w8a16 fp8": ("fp8_e4m3/channel", None, (), 0, "native"),
    "w8a16 int8": ("int8/channel", None, (), 0, "native"),
}
ROWS = 256  # rows of the input on which errors are measured
SPREAD = 1 << 28  # bytes of weights that repeated calls go through
Call = Callable[[], Tensor]


def _replay(calls: Sequence[Call], device: torch.device, pool: Any) -> tuple[Callable[[], Any], int]:
    """(what runs calls, how many): on CUDA a graph of all of them; of an engine that cannot be captured, the first."""
    if device.type != "cuda":
        calls[0]()
        return calls[0], 1
    for call in calls:
        call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool):
            for call in calls:
                call()
    except RuntimeError:  # it waits for the device
        torch.cuda.synchronize(device)
        return calls[0], 1
    graph.replay()
    return graph.replay, len(calls)


def _in_turns(replays: Sequence[tuple[Callable[[], Any], int]], device: torch.device, repeat: int) -> list[list[float]]:
    """Seconds of a call of each, round by round; every round runs all of them, in an order of its own."""
    draw = random.Random(0)
    taken: list[list[float]] = [[] for _ in replays]
    for _ in range(repeat):
        order = draw.sample(range(len(replays)), len(replays))
        spans = _spans([replays[i][0] for i in order], device)
        for i, span in zip(order, spans, strict=True):
            taken[i].append(span / replays[i][1])
    return taken


def _spans(runs: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
    """Seconds of each, one after the other."""
    if device.type != "cuda":
        return [seconds(run, device, 1)[0] for run in runs]
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in runs]
    for run, (start, end) in zip(runs, marks, strict=True):
        start.record()
        run()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1e3 for start, end in marks]


def _rate(flop: float, call: Call, device: torch.device, repeat: int) -> float:
    """FLOP/s of a call, by its median time."""
    return flop / statistics.median(_in_turns([_replay([call], device, None)], device, repeat)[0])


def relative(y: Tensor, want: Tensor) -> float:
    """||y - want|| / ||want|| in float64."""
    return float((y.to(torch.float64) - want).norm() / want.norm())


class Problem:
    """One linear: weight [N, K] and input [M, K] with a few channels 20 times larger, as in real models; BF16."""

    def __init__(self, m: int, k: int, n: int, device: torch.device):
        g = torch.Generator().manual_seed(m + k + n)
        self.m, self.k, self.n, self.device = m, k, n, device
        self.weight = (torch.randn(n, k, generator=g) * k**-0.5).to(device, torch.bfloat16)
        x = torch.randn(min(m, 512), k, generator=g)
        x[:, :: max(1, k // 16)] *= 20.0
        self.x = x.repeat(-(-m // len(x)), 1)[:m].to(device, torch.bfloat16)
        self.bias = torch.randn(n, generator=g).to(device, torch.bfloat16)
        self.exact = self.product(self.x[:ROWS].to(torch.float64), self.weight.to(torch.float64))

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x W^T + bias in the dtype of the operands."""
        return x @ weight.T + self.bias.to(x.dtype)

    def layer(self, engine: str) -> QuantizedLinear:
        """The problem's linear as `engine` has it; its low-rank branch is of plausible size, not fitted."""
        weights, grid, transforms, rank, _ = ENGINES[engine]
        w, steps, side = self.weight.to(torch.float32), [], None
        if "smooth" in transforms:
            factor = self.x[:512].to(torch.float32).abs().amax(0).clamp(min=1e-3).sqrt()
            steps.append(Step("smooth", {"factor": factor}))
            w = w * factor
        if "rotate" in transforms:
            steps.append(Step("rotate", params={"size": group_size((self.k,))}))
            w = steps[-1].apply(w)
        if rank:
            g = torch.Generator().manual_seed(rank)
            up, down = (torch.randn(s, generator=g).to(self.x) * 0.02 for s in ((self.n, rank), (rank, self.k)))
            side, basis = (down, up), down.to(torch.float32)
            for step in steps:  # only smoothing stands beside low rank here
                basis = basis * step.tensors["factor"]
            w = w - up.to(torch.float32) @ basis
        grid = None if grid is None else QuantSpec.parse(grid)
        return QuantizedLinear.build(
            quantize(w, QuantSpec.parse(weights)), activations=grid, steps=steps, side=side, bias=self.bias
        )

    def defined(self, params: LinearParams, grid: str) -> Tensor:
        """float64 result of the dequantized operands for the first rows, on the activation grid `grid`."""
        x = self.x[:ROWS]
        grid = grid.partition(",")[0]  # what few rows run on stands behind a comma
        q = apply_steps(x.to(torch.float32), params.steps)
        q = q if grid == "16-bit" else fake_quantize(q, QuantSpec.parse(grid))
        y = self.product(q.to(torch.float64), params.weight.dequantize().to(torch.float64))
        if params.down is not None:
            y += x.to(torch.float64) @ params.down.to(torch.float64).T @ params.up.to(torch.float64).T
        return y


def copies_of(nbytes: int, device: torch.device) -> int:
    """How many weights of this size calls go through in turn."""
    return max(2, min(64, -(-SPREAD // max(1, nbytes)))) if device.type == "cuda" else 1


@dataclass
class _Line:
    """A line of the table before its time is known: calls, the rate of their unit in FLOP/s, bytes of a weight."""

    engine: str
    calls: list[Call]
    rate: float
    nbytes: int
    more: dict[str, Any]
    exact: bool | None = None  # of another library: whether calls give the layer's result; its failure is a line


def _row(problem: Problem, line: _Line, times: list[float], base: list[float]) -> dict[str, Any]:
    """The line as data; its rate and the bandwidth, kept in the problem, give the physical limit.

    Args:
        times, base: seconds of a call of the line and of the 16-bit product, round by round.
    """
    flop = 2.0 * problem.m * problem.n * problem.k
    moved = line.nbytes + 2 * problem.m * (problem.k + problem.n)
    floor, median = max(flop / line.rate, moved / problem.bandwidth), statistics.median(times)
    ratios = [b / t for b, t in zip(base, times, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    row = {"m": problem.m, "k": problem.k, "n": problem.n, "engine": line.engine, "us": median * 1e6}
    row |= {"ratio": statistics.median(ratios), "ratio_spread": (high - low) / 2}
    return row | {"tflops": flop / median / 1e12, "limit": floor / median} | line.more


def _bf16(problem: Problem, rates: dict[str, float]) -> _Line:
    nbytes = 2 * problem.weight.numel()
    weights = [problem.weight.clone() for _ in range(copies_of(nbytes, problem.device))]
    calls = [lambda w=w: torch.nn.functional.linear(problem.x, w, problem.bias) for w in weights]
    wrong = relative(calls[0]()[:ROWS], problem.exact)
    library = "cuBLAS" if problem.device.type == "cuda" else "torch"
    return _Line("bf16", calls, rates["bf16"], nbytes, dict(error=wrong, layer=wrong, backend=library, grid="16-bit"))


def _unit(choice: Choice, params: LinearParams) -> str:
    """Which ceiling a backend runs against."""
    grid = choice.backend.grid(params)
    if grid == "16-bit":
        return "bf16"
    return "fp8" if choice.backend.name != "int8-mma" else "int8"


def _dq(problem: Problem, engine: str, rates: dict[str, float]) -> _Line:
    layer = problem.layer(engine)
    params = layer.params
    choice = choose_backend(params, problem.device, problem.x.dtype, ENGINES[engine][4])
    copies = [params] + [layer_copy(layer).params for _ in range(copies_of(params.weight.nbytes, problem.device) - 1)]
    run = choice.backend.run
    calls = [lambda p=p: run(problem.x, p) for p in copies]
    grid = choice.backend.grid(params)
    y = calls[0]()[:ROWS]
    more = dict(error=relative(y, problem.defined(params, grid)), layer=relative(y, problem.exact))
    more |= dict(backend=choice.backend.name, grid=grid, refused=choice.refused)
    return _Line(engine, calls, rates[_unit(choice, params)], params.weight.nbytes, more)


def layer_copy(layer: QuantizedLinear) -> QuantizedLinear:
    """A layer of its own memory."""
    side = (layer.lowrank_down, layer.lowrank_up) if layer.config.rank else None
    q = layer.qtensor
    parts = {n: getattr(q, n) for n in ("codes", "scale", "global_scale", "zero_point")}
    clone = type(q)(spec=q.spec, shape=q.shape, **{n: None if t is None else t.clone() for n, t in parts.items()})
    return QuantizedLinear.build(
        clone, activations=layer.config.activations, steps=layer.steps, side=side, bias=layer.bias
    )


def ceilings(device: torch.device, repeat: int, size: int = 8192) -> dict[str, float]:
    """Copy bandwidth in bytes/s, and FLOP/s of BF16, FP8 and INT8 products; what a device lacks counts as BF16.

    INT8 has the rate of FP8 on every GPU that has both.
    """
    size = size if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    flop = 2.0 * size**3
    found = {"bandwidth": copy_bandwidth(device, repeat), "bf16": _rate(flop, lambda: a @ b.T, device, repeat)}
    found |= {"fp8": found["bf16"], "int8": found["bf16"]}
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        one = torch.ones(size, 1, device=device)
        call = lambda: torch._scaled_mm(  # noqa: E731
            a8, b8.T, scale_a=one, scale_b=one.T, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        found["fp8"] = found["int8"] = _rate(flop, call, device, repeat)
    return found


def _lines(
    problem: Problem, rates: dict[str, float], engines: Sequence[str], libraries: Sequence[str]
) -> Iterator[_Line]:
    yield _bf16(problem, rates)
    for line in others(problem, copies_of):
        yield _other(rates, *line)
    for engine in engines:
        yield _dq(problem, engine, rates)
    for line in peers(problem, copies_of, libraries):
        yield _other(rates, *line)


def _other(rates: dict[str, float], name: str, unit: str, nbytes: int, calls: list[Call], exact: bool) -> _Line:
    return _Line(name, calls, rates[unit], nbytes, dict(backend=name, grid="", error=None, layer=None), exact)


def _measured(problem: Problem, lines: Iterable[_Line], repeat: int) -> list[dict[str, Any]]:
    """The rows of a shape, the 16-bit product first. Another library's refusal is a line of the table, not its end."""
    rows: list[dict[str, Any]] = []
    ready: list[tuple[int, _Line, tuple[Callable[[], Any], int]]] = []
    on_gpu = problem.device.type == "cuda"
    pool = torch.cuda.graph_pool_handle() if on_gpu else None  # results are not kept: graphs share their memory
    for line in lines:
        try:
            if line.exact:
                line.more["layer"] = relative(line.calls[0]()[:ROWS], problem.exact)
            ready.append((len(rows), line, _replay(line.calls, problem.device, pool)))
            rows.append({})
        except Exception as error:
            if line.exact is None:
                raise
            failed = str(error).split("\n")[0][:200]
            rows.append(dict(m=problem.m, k=problem.k, n=problem.n, engine=line.engine, failed=failed))
    times = _in_turns([replay for *_, replay in ready], problem.device, repeat)
    for (place, line, _), found in zip(ready, times, strict=True):
        rows[place] = _row(problem, line, found, times[0])
    return rows


def measure(
    models: Sequence[str] = ("flux", "llama-decode"),
    engines: Sequence[str] | None = None,
    device: str | torch.device = "cpu",
    repeat: int = 20,
    divide: int = 1,
    say: Callable[[dict[str, Any]], None] = lambda result: None,
    libraries: Sequence[str] = PEERS,
) -> dict[str, Any]:
    """The table as JSON-clean data.

    Args:
        models: keys of `SHAPES`.
        engines: keys of `ENGINES`; default: all, of few rows those that have kernels of their own for them.
        divide: every size by this, for a quick look or a CPU.
        say: is given the result so far after every shape; its last rows are those of that shape.
        libraries: of `PEERS`, which take part where installed. They compile or tune for every shape.

    Raises:
        DQError: an unknown model, engine or library.
    """
    asked = (models, SHAPES, "model"), (engines or (), ENGINES, "engine"), (libraries, PEERS, "library")
    for words, known, what in asked:
        for word in words:
            if word not in known:
                raise DQError(f"unknown {what} {word!r}{suggest(word, known)}")
    where = torch.device(device)
    found, rows = ceilings(where, repeat), []
    limits = {k: v / (1e9 if k == "bandwidth" else 1e12) for k, v in found.items()}
    result = {"environment": describe(where), "repeat": repeat, "ceilings": limits, "rows": rows}
    for model in models:
        m, shapes = SHAPES[model]
        for k, n in shapes:
            problem = Problem(max(1, m // divide), k // divide, n // divide, where)
            problem.bandwidth = found["bandwidth"]
            chosen = engines or [e for e in ENGINES if m > 16 or e == "fp8" or "a16" in e]
            these = _measured(problem, _lines(problem, found, chosen, libraries), repeat)
            for row in these:
                row["model"] = model
            rows += these
            say(result)
    return result
