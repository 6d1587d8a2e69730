"""`QuantizedLinear`: an `nn.Linear` whose weight rests as codes and scales in buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dq.execution import COMPILED, allow_tracing, run, shared, traced
from dq.linear_config import LinearConfig
from dq.ops import BACKENDS, Choice, LinearParams, choose_backend
from dq.qtensor import QTensor
from dq.registry import DQError
from dq.steps import StepContext
from dq.transforms import TRANSFORMS, Step, apply_steps


class _Frozen(torch.autograd.Function):
    """A quantized linear in training: rounding has no useful derivative, so activations are passed straight through."""

    @staticmethod
    def forward(ctx, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return layer._run(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.layer.dequantized_weight(grad.dtype), None  # decoded anew: nothing of size N K is kept


class QuantizedLinear(nn.Linear):
    """`y = Q_X(pre(x)) @ Q_W(W')^T + (x @ down^T) @ up^T + b`; see dq.ops.

    A subclass of `nn.Linear`, so that peft and diffusers attach adapters to it. `.weight` holds no data: it is a
    zero-storage tensor (NaN) of the logical shape [N, K] in the compute dtype, for code that asks for shape, dtype or
    device. Scales keep their dtype under `.to(dtype)`: casting them would change every weight. The layer itself is
    frozen; gradients pass through it to its input.

    Args:
        in_features, out_features: K and N.
        config: grids, input steps, rank.
        bias: whether there is one.
        dtype: the compute dtype that `.weight` reports.
        device: where the (uninitialised) buffers are made; "meta" for loading.
    """

    def __init__(
        self, in_features, out_features, config: LinearConfig, *, bias=True, dtype=torch.bfloat16, device=None
    ):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.config = in_features, out_features, config
        self.compute_dtype, self.activations_mode, self.sqnr_db, self.calls = dtype, "auto", None, 0
        self._compiled = False
        for name, (shape, kind) in config.tensors(out_features, in_features).items():
            self.register_buffer(name, torch.empty(shape, dtype=kind, device=device))
        empty = (
            nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), requires_grad=False) if bias else None
        )
        self.register_parameter("bias", empty)
        BACKENDS.discover()  # not in the first call: it may be a compiled one, and imports are no part of a graph
        allow_tracing()
        self.step_context = StepContext()  # the model's own once `dq.steps.watch` has seen it

    @classmethod
    def build(
        cls,
        weight: QTensor,
        *,
        activations=None,
        steps=(),
        side=None,
        bias=None,
        dtype=torch.bfloat16,
        input_scale=None,
        input_edges=None,
        residual=0,
        dual=False,
    ):
        """A layer from finished parts: `QTensor`, `Step`s, (down, up), bias [N], static activation scale [1, 1] (or
        scales [G, 1] and edges [G - 1] of step groups), and how many residual channels the weight has."""
        dtype_name = "bfloat16" if side is None else str(side[0].dtype).removeprefix("torch.")
        pairs, rank = tuple((s.name, dict(s.params)) for s in steps), 0 if side is None else len(side[0])
        groups = 0 if input_edges is None else len(input_scale)
        config = LinearConfig(weight.spec, activations, pairs, rank, dtype_name, residual, dual, groups)
        n, k = weight.shape[0], weight.shape[1] - config.extra
        layer = cls(k, n, config, bias=bias is not None, dtype=dtype, device="meta")
        parts = {"qweight": weight.codes, "weight_scale": weight.scale, "weight_global_scale": weight.global_scale}
        parts |= {"weight_zero_point": weight.zero_point, "input_scale": input_scale, "input_edges": input_edges}
        # Copies: layers of one group share these values, and a checkpoint must not hold aliased tensors.
        for s in steps:
            kinds = TRANSFORMS.get(s.name).tensors(k, s.params)
            parts |= {f"{s.name}_{key}": t.to(kinds[key][1]).clone() for key, t in s.tensors.items()}
        if side is not None:
            parts |= {"lowrank_down": side[0], "lowrank_up": side[1]}
        for name in layer._buffers:
            setattr(layer, name, parts[name].detach().contiguous())
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
        return layer

    # Attributes that `.weight` carries: a loader that marks what it need not initialise finds its mark on it.
    weight_marks: ClassVar[dict[str, Any]] = {}

    @property
    def weight(self) -> Tensor:
        # NaN, not whatever lay there: code that computes with it must not go unnoticed.
        one = torch.full((1,), torch.nan, dtype=self.compute_dtype, device=self.qweight.device)
        weight = one.expand(self.out_features, self.in_features)
        for name, value in self.weight_marks.items():
            setattr(weight, name, value)
        return weight

    @property
    def config(self) -> LinearConfig:
        return self._config

    @config.setter
    def config(self, config: LinearConfig) -> None:
        self._config, self._text = config, config.text(self.out_features, self.in_features)
        self._choice: tuple[tuple, Choice] | None = None

    @property
    def qtensor(self) -> QTensor:
        """The quantized W' (views of the buffers)."""
        return self._config.qtensor(self._buffers, self.out_features, self.in_features)

    @property
    def steps(self) -> list[Step]:
        """The input steps with their tensors."""
        return self._config.steps_of(self._buffers, self.in_features)

    def _parts(self) -> dict[str, Tensor]:
        """The buffers, of scales of step groups the one that applies."""
        parts = self._buffers
        if "input_edges" in parts:
            parts = parts | {"input_scale": self.step_context.pick(parts["input_scale"], parts["input_edges"])}
        return parts

    @property
    def params(self) -> LinearParams:
        return self._config.params(self._parts(), self.bias, self.out_features, self.in_features)

    def forward(self, input: Tensor) -> Tensor:
        """input [..., K] -> [..., N] in its dtype, with the gradient of `input @ dequantized_weight()^T`. The argument
        is named as in nn.Linear: some models call `proj(input=x)`."""
        if input.requires_grad and torch.is_grad_enabled():
            return _Frozen.apply(input, self)
        return self._run(input)

    def _run(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            parts = self._parts()
            object.__setattr__(self, "_compiled", True)  # as nn.Module does it, it would take a dozen guards
            return traced(x, self.bias, self._text, self.activations_mode, tuple(parts), *parts.values())
        params = self.params
        params.shared = shared(x, id(self))
        y = run(self.choose(x.device, x.dtype, params), x, params)
        self.__dict__["calls"] += 1  # nn.Module's own way to set an attribute takes a tenth of the call
        return y

    def choose(self, device: torch.device, dtype: torch.dtype, params: LinearParams | None = None) -> Choice:
        """The backend for inputs of this kind; decided once per (device, dtype, mode)."""
        key = (device, dtype, self.activations_mode)
        if self._choice is None or self._choice[0] != key:
            self._choice = (key, choose_backend(params or self.params, device, dtype, self.activations_mode))
        return self._choice[1]

    @property
    def ran(self) -> Choice | None:
        """What the last call was run by; of a compiled layer, what it was compiled to."""
        if self._choice is None and self._compiled:
            return COMPILED.get((self._text, self.activations_mode))
        return self._choice and self._choice[1]

    def _transformed_weight(self) -> Tensor:
        """W' [N, K] as it is executed, float32."""
        wide = self.qtensor.dequantize()
        w, s = wide[:, : self.in_features], self.config.residual
        return torch.cat([w[:, :-s], w[:, -s:] + wide[:, -s:]], 1) if self.config.dual else w

    def constant(self) -> Tensor | None:
        """[N] float32, `W' pre(0)`: what a shifted input adds to the output, and the bias takes off; None without."""
        if not self.config.shifted:
            return None
        zero = torch.zeros(1, self.in_features, device=self.qweight.device)
        return (apply_steps(zero, self.steps) @ self._transformed_weight().T)[0]

    def dequantized_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """The raw-basis weight [N, K] that this layer stands for: W' moved back through the input steps, plus L."""
        w = self._transformed_weight()
        for step in reversed(self.steps):
            w = TRANSFORMS.get(step.name).unweight(w, step.tensors, step.params)
        if self.config.rank:
            w = w + self.lowrank_up.to(torch.float32) @ self.lowrank_down.to(torch.float32)
        return w.to(dtype or self.compute_dtype)

    def _apply(self, fn, recurse=True):
        """Moves buffers, never casts them; the bias and the reported dtype follow a cast.

        Raises:
            DQError: a cast to a dtype that no linear computes in.
        """
        dtype = fn(torch.empty(0, dtype=self.compute_dtype, device=self.qweight.device)).dtype
        if dtype.itemsize < 2:  # diffusers' layerwise casting
            name = str(dtype).removeprefix("torch.")
            raise DQError(
                f"a quantized linear cannot be cast to {name}: its codes are small already, its bias would suffer"
            )
        buffers, self._buffers = self._buffers, {}
        super()._apply(fn, recurse)
        self._buffers = {name: _keep_dtype(fn, t) for name, t in buffers.items()}
        self.compute_dtype, self._choice = dtype, None
        return self

    def __getstate__(self):
        # A chosen backend is a value of this process. Plain pickle cannot read float8 tensors back: they go as bytes.
        buffers = {n: t.view(torch.uint8) if _is_float8(t.dtype) else t for n, t in self._buffers.items()}
        return self.__dict__ | {"_choice": None, "_buffers": buffers}

    def __setstate__(self, state):
        super().__setstate__(state)
        BACKENDS.discover()
        allow_tracing()
        for name, (_, dtype) in self.config.tensors(self.out_features, self.in_features).items():
            if _is_float8(dtype) and self._buffers[name].dtype == torch.uint8:
                self._buffers[name] = self._buffers[name].view(dtype)

    def extra_repr(self) -> str:
        c = self.config
        extra = "".join(f", {n}" for n, _ in c.steps) + (f", rank={c.rank}" if c.rank else "")
        extra += f", residual={c.residual}{' dual' if c.dual else ''}" if c.residual else ""
        return f"{self.in_features}, {self.out_features}, weights={c.weights}, activations={c.activations}{extra}"


def _is_float8(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


def _keep_dtype(fn, tensor: Tensor) -> Tensor:
    moved = fn(tensor)
    return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)


@dataclass(frozen=True)
class LayerInfo:
    """One row about one quantized linear, for reports; `backend` and `grid` are what ran last ("" before any call);
    `in_torch` says why plain torch prepared the input for that kernel, "" if it did not."""

    name: str
    shape: tuple[int, int]
    weights: str
    activations: str | None
    transforms: str
    nbytes: int
    nbytes_16bit: int
    backend: str
    grid: str
    calls: int
    sqnr_db: float | None
    in_torch: str = ""


class LayerTable(list):
    """A list of `LayerInfo` that prints as a table."""

    def __repr__(self) -> str:
        rows = [("layer", "N x K", "weights", "activations", "transforms", "ran", "SQNR")]
        for x in self:
            ran = f"{x.backend} {x.grid} x{x.calls}" if x.calls else "-"
            ran += f" (input by torch: {x.in_torch})" if x.in_torch else ""
            sqnr = "-" if x.sqnr_db is None else f"{x.sqnr_db:.1f} dB"
            size = "{} x {}".format(*x.shape)
            rows.append((x.name, size, x.weights, x.activations or "16-bit", x.transforms or "-", ran, sqnr))
        wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, wide)).rstrip() for row in rows)


def quantized_linears(model: nn.Module) -> dict[str, QuantizedLinear]:
    """name -> layer, in module order."""
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}


def layer_info(model: nn.Module) -> list[LayerInfo]:
    """What every quantized linear of the model is, and which kernel and activation grid ran last."""
    if not isinstance(model, nn.Module):
        raise DQError(f"layer_info takes a model (of a pipeline its transformer or unet), got {type(model).__name__}")
    rows = LayerTable()
    for name, m in quantized_linears(model).items():
        c, ran = m.config, m.ran.backend if m.ran else None
        parts = [n for n, _ in c.steps] + ([f"low rank {c.rank}"] if c.rank else [])
        parts += [f"{'dual ' if c.dual else ''}residual {c.residual}"] if c.residual else []
        n, k = m.out_features, m.in_features
        nbytes = sum(t.numel() * t.element_size() for t in m._buffers.values())
        backend, grid = (ran.name, ran.grid(m.params)) if ran else ("", "")
        act = None if c.activations is None else str(c.activations)
        what = (name, (n, k), str(c.weights), act, ", ".join(parts), nbytes, 2 * n * k)
        rows.append(LayerInfo(*what, backend, grid, m.calls, m.sqnr_db, ran.in_torch(m.params) if ran else ""))
    return rows
