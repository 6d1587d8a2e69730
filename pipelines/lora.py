"""`load_lora`: the pipeline's own `load_lora_weights`, and a check that all of the file arrived.

The libraries convert many forms of keys, and pass over what they do not know: a key that matches nothing, an alpha that
is not applied. Two things are the same in every form, so they can be compared without knowing it:

    |alpha / r  B A|_F^2   summed over all layers: splitting q, k, v or renaming leaves it as it is
    the directions of A's rows: scaled by alpha, copied to q, k and v or divided among them, they stay
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dq import checks
from dq.pipelines.adapters import adapted
from dq.registry import DQError, typed

_SIDES = (("lora_A", "lora_B"), ("lora_down", "lora_up"), ("lora.down", "lora.up"))
_MAGNITUDE = ".lora_magnitude_vector"
SHOWN = 20


def load_lora(
    obj: Any, source: Any, *, adapter_name: str = "default", weight: float = 1.0, strict: bool = True, **kwargs: Any
) -> Any:
    """Loads a LoRA with `obj.load_lora_weights`, checks that all of it arrived, and makes it active; returns `obj`.

    Args:
        obj: a diffusers pipeline, quantized or not.
        source: path of a .safetensors file, a folder with `weight_name=...`, or a state dict, in any form that
            diffusers converts.
        weight: what the adapter is multiplied by; others that are active stay so.
        strict: refuse what did not arrive whole; False only warns.
        kwargs: for `load_lora_weights`.

    Raises:
        DQError: the pipeline takes no LoRA, the file cannot be read; or, if strict, keys of the file matched nothing or
            the adapter is stronger or weaker than the file says. The adapter is removed again then. A weight that is
            no finite number.
    """
    if not hasattr(obj, "load_lora_weights"):
        raise DQError(f"{type(obj).__name__} takes no LoRA: it has no load_lora_weights")
    typed(adapter_name, str, "adapter_name is text")
    weight = checks.finite(weight, "weight")
    state, active = _state(source, kwargs), _active(obj)
    if any(adapter_name in layer.r for layer in _layers(obj).values()):
        raise DQError(
            f"an adapter {adapter_name!r} is loaded already; give another adapter_name, or delete_adapters it"
        )
    with checks.one_line("the LoRA cannot be loaded"):
        obj.load_lora_weights(dict(state), adapter_name=adapter_name)
    problem = _problem(state, _layers(obj), adapter_name)
    if problem and strict:
        if any(adapter_name in layer.r for layer in _layers(obj).values()):
            obj.delete_adapters(adapter_name)
        if not active and adapted(obj):
            obj.unload_lora_weights()
        raise DQError(problem + "; strict=False loads the rest")
    if problem:
        warnings.warn(problem, stacklevel=2)
    if any(adapter_name in layer.r for layer in _layers(obj).values()):
        obj.set_adapters([*active, adapter_name], [*active.values(), weight])
    return obj


def _layers(obj: Any) -> dict[str, nn.Module]:
    return {n: layer for n, layer in adapted(obj).items() if hasattr(layer, "lora_A")}


def _active(obj: Any) -> dict[str, float]:
    """Active adapters -> their weights."""
    out: dict[str, float] = {}
    for layer in _layers(obj).values():
        for name in layer.active_adapters if not layer.disable_adapters else ():
            if name in layer.r:
                full = layer.lora_alpha[name] / (layer.r[name] ** 0.5 if layer.use_rslora[name] else layer.r[name])
                out[name] = float(layer.scaling[name]) / full
    return out


def _state(source: Any, kwargs: dict[str, Any]) -> dict[str, Tensor]:
    if isinstance(source, dict):
        return _checked(source)
    from safetensors.torch import load_file

    path = Path(typed(source, (str, Path), "a LoRA is a path or a state dict"))
    path = path / kwargs.pop("weight_name", "pytorch_lora_weights.safetensors") if path.is_dir() else path
    with checks.one_line(f"{path} cannot be read"):
        return _checked(load_file(path))


def _checked(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict, if every factor is there with its other half and all values are finite."""
    for key, tensor in state.items():
        halves = [(a, b) for pair in _SIDES for a, b in (pair, pair[::-1]) if f".{a}." in key]
        for a, b in halves:
            other = key.replace(f".{a}.", f".{b}.")
            if other not in state:
                raise DQError(f"the LoRA holds {key} and lacks {other}: the file is incomplete")
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and not torch.isfinite(tensor.float()).all():
            raise DQError(f"the LoRA holds NaN or Inf in {key}")
    return state


def _pairs(state: dict[str, Tensor]) -> tuple[dict[str, tuple[Tensor, Tensor, float]], list[str]]:
    """(name -> (down [r, K], up [N, r], alpha / r), keys that belong to no pair)."""
    out, rest = {}, dict(state)
    for key in state:
        for a, b in _SIDES:
            other = key.replace(f".{a}.", f".{b}.")
            if f".{a}." in key and other in state:
                name, down, up = key.partition(f".{a}.")[0], rest.pop(key), rest.pop(other)
                alpha = rest.pop(f"{name}.alpha", None)
                scale = 1.0 if alpha is None else float(alpha) / len(down)
                out[name] = (down.flatten(1).to(torch.float32), up.flatten(1).to(torch.float32), scale)
    return out, list(rest)


def _power(down: Tensor, up: Tensor, scale: float) -> float:
    """|scale up down|_F^2 for down [r, K] and up [N, r]."""
    return scale**2 * float(((up.T @ up).double() * (down @ down.T).double()).sum())


def _directions(down: Tensor) -> Tensor:
    """The rows of unit length, those of zeros left out; on the CPU."""
    length = down.norm(dim=1)
    return (down[length > 0] / length[length > 0][:, None]).cpu()


def _problem(state: dict[str, Tensor], layers: dict[str, nn.Module], adapter: str) -> str:
    """What of the file did not arrive, in one sentence; "" if all did."""
    pairs, unmatched = _pairs(state)
    if any(adapter in getattr(layer, "lora_magnitude_vector", ()) for layer in layers.values()):  # DoRA's norms
        unmatched = [key for key in unmatched if not key.partition(_MAGNITUDE)[1]]
    total, known, got = len(pairs) + len(unmatched), {}, 0.0
    for layer in layers.values():
        if adapter in layer.r:
            down, up = (side[adapter].weight.detach().flatten(1).float() for side in (layer.lora_A, layer.lora_B))
            known.setdefault(down.shape[1], []).append(_directions(down))
            got += _power(down, up, float(layer.scaling[adapter]))
    known = {width: torch.cat(rows) for width, rows in known.items()}
    wanted, missing = 0.0, []
    for name, (down, up, scale) in pairs.items():
        mine, there = _directions(down), known.get(down.shape[1])
        if len(mine) and (there is None or (there @ mine[0]).abs().max() < 0.999):
            missing.append(name)
        else:
            wanted += _power(down, up, scale)
    unmatched = missing + unmatched
    if unmatched:
        shown = ", ".join(unmatched[:SHOWN]) + (", .." if len(unmatched) > SHOWN else "")
        return f"{len(unmatched)} of {total} modules of the LoRA match nothing in the pipeline: {shown}"
    ratio = (got / wanted) ** 0.5 if wanted else 1.0
    if abs(ratio - 1) > 0.02:
        why = "alphas that were not applied, or modules that were left out"
        return f"the LoRA was loaded with {ratio:.2f} times the strength that its file says: {why}"
    return ""
