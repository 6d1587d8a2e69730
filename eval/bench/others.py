"""What else multiplies low-bit matrices: cuBLASLt and PyTorch's operators alone, torchao and gemlite if installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dq.kernels.gemm import layout
from dq.qtensor import quantize
from dq.spec import QuantSpec

# (name, unit of the ceilings, bytes of a weight, calls over copies of the weight, whether they give the layer's result)
Line = tuple[str, str, int, list[Callable[[], Tensor]], bool]


def others(problem: Any, copies: Callable[[int, torch.device], int]) -> Iterator[Line]:
    """PyTorch's own operators that can run the problem on its device."""
    if problem.device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(problem.device)
    count = copies(problem.n * problem.k, problem.device)
    if capability >= (8, 9):
        yield _fp8_alone(problem, count)
    if problem.m > 16:
        yield _int8_alone(problem, count)
    else:
        yield _int4pack(problem, 2 * count)


def peers(problem: Any, copies: Callable[[int, torch.device], int], libraries: Sequence[str]) -> Iterator[Line]:
    """The linears of `libraries`, where installed. They compile or tune for every shape."""
    if problem.device.type != "cuda":
        return
    for name, unit, nbytes, make in _installed(problem, libraries):
        try:
            layers = [make() for _ in range(copies(nbytes, problem.device))]
        except Exception as error:  # a version that does not fit, or a shape that it refuses
            yield name, unit, nbytes, [_failing(error)], True
            continue
        yield name, unit, nbytes, [lambda f=f: f(problem.x) for f in layers], True


def _failing(error: Exception) -> Callable[[], Tensor]:
    def call() -> Tensor:
        raise error

    return call


def _fp8_alone(p: Any, count: int) -> Line:
    sa, sb = p.x.float().abs().amax(1, keepdim=True) / 448, p.weight.float().abs().amax(1, keepdim=True) / 448
    a = (p.x / sa).clamp(-448, 448).to(torch.float8_e4m3fn)
    weights = [(p.weight / sb).clamp(-448, 448).to(torch.float8_e4m3fn) for _ in range(count)]

    def call(w: Tensor) -> Tensor:
        return torch._scaled_mm(
            a, w.T, scale_a=sa, scale_b=sb.T, bias=p.bias, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return "cuBLASLt FP8 alone", "fp8", p.n * p.k, [lambda w=w: call(w) for w in weights], True


def _int8_alone(p: Any, count: int) -> Line:
    a = torch.randint(-127, 128, (p.m, p.k), device=p.device, dtype=torch.int8)
    weights = [torch.randint(-127, 128, (p.n, p.k), device=p.device, dtype=torch.int8) for _ in range(count)]
    return "_int_mm alone", "int8", p.n * p.k, [lambda w=w: torch._int_mm(a, w.T) for w in weights], False


def _int4pack(p: Any, count: int) -> Line:
    """Asymmetric INT4 in groups of 64 with BF16 scales, random codes: a time, not a result."""
    packed = []
    for _ in range(count):
        codes = torch.randint(0, 256, (p.n, p.k // 2), device=p.device, dtype=torch.uint8)
        packed.append(torch._convert_weight_to_int4pack(codes, 8))
    scale = torch.randn(p.k // 64, p.n, 2, device=p.device, dtype=torch.bfloat16)
    calls = [lambda w=w: torch._weight_int4pack_mm(p.x, w, 64, scale) for w in packed]
    nbytes = p.n * p.k // 2 + 2 * scale.numel()
    return "_weight_int4pack_mm", "bf16", nbytes, calls, False


def _linear(p: Any) -> torch.nn.Linear:
    layer = torch.nn.Linear(p.k, p.n, device=p.device, dtype=torch.bfloat16)
    layer.weight.data.copy_(p.weight)
    layer.bias.data.copy_(p.bias)
    return layer.requires_grad_(False)


def _installed(
    p: Any, libraries: Sequence[str]
) -> Iterator[tuple[str, str, int, Callable[[], Callable[[Tensor], Tensor]]]]:
    """(name, unit, bytes of a weight, maker of a linear) of the libraries that are installed."""
    for library in libraries:
        place, lines = PEERS[library]
        try:
            module = importlib.import_module(place)
        except Exception:  # not installed, or it fails on import beside this torch
            continue
        yield from lines(p, module)


def _torchao(p: Any, ao: Any) -> Iterator[tuple[str, str, int, Callable[[], Callable[[Tensor], Tensor]]]]:
    torch._dynamo.reset()  # one compiled call for all copies of a weight; what other shapes compiled is not needed
    compiled = torch.compile(torch.nn.functional.linear, dynamic=False)

    def make(config: Any) -> Callable[[Tensor], Tensor]:
        box = torch.nn.Sequential(_linear(p))
        ao.quantize_(box, config)
        return lambda x: compiled(x, box[0].weight, box[0].bias)

    if p.m > 16:
        fp8 = ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow())
        yield "torchao FP8 per row", "fp8", p.n * p.k, lambda: make(fp8)
        yield "torchao INT8 dynamic", "int8", p.n * p.k, lambda: make(ao.Int8DynamicActivationInt8WeightConfig())
    else:
        yield "torchao INT8 weights", "bf16", p.n * p.k, lambda: make(ao.Int8WeightOnlyConfig())


def _gemlite(p: Any, helper: Any) -> Iterator[tuple[str, str, int, Callable[[], Callable[[Tensor], Tensor]]]]:
    def make(name: str) -> Callable[[Tensor], Tensor]:
        return getattr(helper, name)(device=str(p.device), dtype=torch.bfloat16).from_linear(_linear(p))

    def four(group: int) -> Callable[[Tensor], Tensor]:
        """INT4 as dq quantizes it, with 8 as zero point."""
        q = quantize(p.weight.to(torch.float32), QuantSpec("int4", "group", group))
        codes = (layout.values(q.codes, "int4", p.k) + 8).to(torch.uint8)
        scale = q.scale.to(torch.bfloat16)
        whole = helper.A16Wn(device=str(p.device), dtype=torch.bfloat16)
        return whole.from_weights(codes, scale, torch.full_like(scale, 8.0), 4, group, p.bias)

    if p.m > 16:
        yield "gemlite INT8 dynamic", "int8", p.n * p.k, lambda: make("A8W8_int8_dynamic")
        return
    for group in (64, 128):
        yield f"gemlite INT4 g{group}", "bf16", p.n * p.k // 2, lambda group=group: four(group)
    yield "gemlite INT8 weights", "bf16", p.n * p.k, lambda: make("A16W8_INT8")


PEERS = {"torchao": ("torchao.quantization", _torchao), "gemlite": ("gemlite.helper", _gemlite)}
