"""Folding: the division `x / lambda` of a smoothing goes into what makes x, and costs nothing at run time.

    modulation   x = LN(h) (1 + scale) + shift, [shift, scale, ..] = W_m c + b_m:  rows W / lambda,
                 b_scale' = (b_scale + 1) / lambda - 1,  b_shift' = b_shift / lambda
    rows         x = values of an attention, or one factor of a GLU:  rows and bias / lambda
    norm         x = norm(h) * g + b:  g / lambda, b / lambda

Exact in real arithmetic if all that read x have the same lambda; then every number of the producer is rounded once more
to its own dtype. Through a GELU nothing can be folded. The input of a folded layer is x / lambda itself: whatever else
was made for x, such as the A of a LoRA, must be multiplied by lambda along K.
Sources: SmoothQuant (arXiv 2211.10438) for norms, PTQ4DiT (arXiv 2405.16005, section 4.4) for modulations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from dq.family import Family, Fold, find_family
from dq.linear import QuantizedLinear, quantized_linears
from dq.registry import DQError

_SCALES = ("fp32", "fp16", "bf16")  # formats of scales that take a factor, rounded to themselves


def divide_vectors(scale: Tensor, shift: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
    """(multiplier, shift) [.., K] with `LN(h) * multiplier + shift = (LN(h) (1 + scale) + shift) / lambda`.

    For a modulation that blocks share (FLUX.2; PixArt, Wan and Sana with their tables), whose weights belong to no
    single lambda: B K divisions per block and step in place of T K.
    """
    return (1 + scale) / lam, shift / lam


def refusal(fold: Fold, module: nn.Module, width: int) -> str:
    """Why 1/lambda [width] cannot go into a producer exactly; "" if it can."""
    if fold.kind == "norm":
        weight = getattr(module, "weight", None)
        same = isinstance(weight, nn.Parameter) and tuple(weight.shape) == (width,)
        return "" if same else f"it has no weight of {width} channels"
    if not isinstance(module, nn.Linear):
        return f"{type(module).__name__} is no linear"
    rows = module.out_features // fold.chunks
    share = 1 if fold.kind == "modulation" or not rows else width // rows  # chunks that make up one input
    if (rows * fold.chunks, rows * share) != (module.out_features, width) or len(fold.at) % share:
        return f"its {module.out_features} rows are not {fold.chunks} x {width}"
    if fold.kind == "modulation" and module.bias is None:
        return "it has no bias to take 1/lambda - 1"
    if isinstance(module, QuantizedLinear):
        spec = module.config.weights
        if module.config.rank:
            return "its low-rank factors rest in 16 bits"
        if spec.strategy not in ("channel", "group") or spec.scale_format not in _SCALES or spec.global_scale:
            return f"its weights {spec} have no scale per row in 16 or 32 bits: fold before quantizing"
    return ""


def _out_of_range(fold: Fold, module: nn.Module, lam: Tensor) -> str:
    """Why scales of a quantized producer would not hold the quotient; "" if they would."""
    if not isinstance(module, QuantizedLinear) or module.weight_scale.dtype != torch.float16:
        return ""
    info, width = torch.finfo(torch.float16), module.out_features // fold.chunks
    for place, at in enumerate(fold.at):
        rows = module.weight_scale[at * width : (at + 1) * width].to(torch.float64)
        found = (rows / _part(lam, width, place).to(rows)[:, None])[rows >= info.smallest_normal]
        if found.numel() and (found.min() < info.smallest_normal or found.max() > info.max):
            return f"a factor of {float(lam.min()):.3g} to {float(lam.max()):.3g} takes its float16 scales out of range"
    return ""


def _part(lam: Tensor, width: int, place: int) -> Tensor:
    """Lambda of the chunk of `width` rows that is the given one of those to be divided."""
    return lam.unflatten(0, (-1, width))[place % (len(lam) // width)]


def fold_into(fold: Fold, module: nn.Module, lam: Tensor, name: str = "the layer") -> None:
    """Divides one producer by lambda [K] in place, computed in float64.

    Args:
        fold: its kind, `chunks` and `at`; names are not looked at.

    Raises:
        DQError: it is not exact there (names the layer).
    """
    why = refusal(fold, module, len(lam)) or _out_of_range(fold, module, lam)
    if why:
        raise DQError(f"cannot fold a smoothing factor into {name}: {why}")
    bias = getattr(module, "bias", None)
    if fold.kind == "norm":
        _edit(module.weight, slice(None), lambda t: t / lam.to(t))
    width = len(lam) if fold.kind == "norm" else module.out_features // fold.chunks
    for place, at in enumerate(fold.at):
        rows = slice(at * width, (at + 1) * width)
        part = _part(lam, width, place)
        one = float(fold.kind == "modulation" and place % 2)  # what the norm's output is multiplied by is 1 + scale
        if fold.kind != "norm":
            numbers = module.weight_scale if isinstance(module, QuantizedLinear) else module.weight
            _edit(numbers, rows, lambda t, part=part: t / part.to(t)[:, None])
        if bias is not None:
            _edit(bias, rows, lambda t, one=one, part=part: (t + one) / part.to(t) - one)


def _edit(tensor: Tensor, rows: slice, change: Callable[[Tensor], Tensor]) -> None:
    with torch.no_grad():
        tensor[rows] = change(tensor[rows].to(torch.float64)).to(tensor.dtype)


def smooth_weights(model: nn.Module, fold: Fold, lam: Tensor) -> None:
    """Smooths a 16-bit model for good: all consumers' weights times lambda [K], the producers divided by it.

    Args:
        fold: with the names of modules, as `Family.folds_in` gives it.

    Raises:
        DQError: one of them cannot take it exactly (names the layer); nothing was changed then.
    """
    fold = present(model, fold)
    for name in fold.consumers:
        layer = model.get_submodule(name)
        if isinstance(layer, QuantizedLinear) or not isinstance(layer, nn.Linear):
            raise DQError(f"cannot smooth the weight of {name}: a {type(layer).__name__} is no 16-bit linear")
    _producers(model, fold, lam)
    for name in fold.consumers:
        _edit(model.get_submodule(name).weight, slice(None), lambda t: t * lam.to(t))


def present(model: nn.Module, fold: Fold) -> Fold:
    """The fold without what the model does not have: a last block without a text output, a model without image tokens.

    Raises:
        DQError: none of its producers is there.
    """
    known = dict(model.named_modules())
    consumers, producers = (tuple(n for n in names if n in known) for names in (fold.consumers, fold.producers))
    if not producers:
        raise DQError(f"there is no {fold.producers[0]} to fold into")
    return replace(fold, consumers=consumers, producers=producers)


def _producers(model: nn.Module, fold: Fold, lam: Tensor) -> None:
    """All producers or none."""
    modules = {name: model.get_submodule(name) for name in fold.producers}
    for name, module in modules.items():
        why = refusal(fold, module, len(lam)) or _out_of_range(fold, module, lam)
        if why:
            raise DQError(f"cannot fold a smoothing factor into {name}: {why}")
    for name, module in modules.items():
        fold_into(fold, module, lam, name)


@dataclass
class Folded:
    """What `fold_model` did.

    Attributes:
        layers: linears that no longer divide.
        kept: linear -> why it still does.
    """

    layers: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.layers and not self.kept:
            return "nothing to fold: no linear divides its input"
        lines = [f"{len(self.layers)} linears no longer divide their input, {len(self.kept)} still do"]
        for reason in dict.fromkeys(self.kept.values()):
            names = [name for name, why in self.kept.items() if why == reason]
            lines.append(f"  {names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}: {reason}")
        return "\n".join(lines)


def fold_model(model: nn.Module, family: Family | None = None) -> Folded:
    """Takes the smoothing step out of every quantized linear where the family says what makes its input and folding is
    exact; in place.

    Raises:
        DQError: nothing in the model is quantized.
    """
    layers = quantized_linears(model)
    if not layers:
        raise DQError(f"{type(model).__name__} holds no quantized linear")
    family, out = family or find_family(model), Folded()
    smoothed = [n for n, layer in layers.items() if any(step == "smooth" for step, _ in layer.config.steps)]
    for fold in family.folds_in(layers):
        if not any(name in smoothed and name not in out.layers for name in fold.consumers):
            continue
        try:
            fold = present(model, fold)
            _producers(model, fold, _common_factor(layers, fold))
        except DQError as error:
            for name in fold.consumers:
                out.kept |= {name: str(error)} if name in smoothed and name not in out.kept else {}
            continue
        for name in fold.consumers:
            _drop_step(layers[name])
            out.kept.pop(name, None)
        out.layers += fold.consumers
    rest = (n for n in smoothed if n not in out.layers and n not in out.kept)
    out.kept |= dict.fromkeys(rest, f"the family {family.name} names nothing that its factor can be folded into")
    return out


def _common_factor(layers: dict[str, QuantizedLinear], fold: Fold) -> Tensor:
    """The factor by which all consumers divide their raw input.

    Raises:
        DQError: one of them does not, divides by another, or reads the raw input besides.
    """
    factors = []
    for name in fold.consumers:
        layer = layers.get(name)
        if layer is None:
            raise DQError(f"{name} reads the same input and is not quantized")
        if not layer.config.steps or layer.config.steps[0][0] != "smooth":
            raise DQError(f"{name} reads the same input and does not divide it first")
        if layer.config.rank:
            raise DQError(f"the low-rank branch of {name} reads the raw input")
        factors.append(layer.smooth_factor)
    if any(not torch.equal(f, factors[0]) for f in factors):
        raise DQError(f"{', '.join(fold.consumers)} divide the same input by different factors")
    return factors[0].clone()


def _drop_step(layer: QuantizedLinear) -> None:
    layer.config = replace(layer.config, steps=layer.config.steps[1:])
    del layer.smooth_factor
    layer._choice = None
