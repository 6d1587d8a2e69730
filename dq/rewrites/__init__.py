"""Rewrites of a whole model that leave its function as it is, one file each: norms folded away, the residual rotated.

Transforms change one group of linears and may leave work to run time; a rewrite moves weights across modules, before
anything is quantized, and leaves an ordinary 16-bit model behind. What is where, a `Structure` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dq.registry import DQError, Registry, check_params


@dataclass(frozen=True)
class Norm:
    """A norm that reads the residual stream, and all linears that read what it gives."""

    name: str
    consumers: tuple[str, ...]


@dataclass(frozen=True)
class Attention:
    """Where values are made and consumed: the rows of `value` from `first` on give [tokens, kv_heads * head_dim],
    `output` takes [tokens, heads * head_dim], each kv head standing for heads / kv_heads heads in a row."""

    value: str
    output: str
    heads: int
    kv_heads: int
    head_dim: int
    first: int = 0


@dataclass(frozen=True)
class Structure:
    """The residual stream of a decoder: who writes to it and who reads it. All names are module names.

    Attributes:
        width: d of the stream.
        embeddings: embedding modules [*, d] whose sum starts the stream.
        norms: every norm that reads it, the final one included; nothing reads it but through them.
        writers: linears [d, *] whose output is added to it.
        attentions: one per block.
        head: the output projection, one of the final norm's consumers, or "".
        fixed: why no rotation may pass the stream, "" if it may.
        routers: consumers that no recipe quantizes: what chooses and weighs the experts of a mixture.
    """

    width: int
    embeddings: tuple[str, ...]
    norms: tuple[Norm, ...]
    writers: tuple[str, ...]
    attentions: tuple[Attention, ...] = ()
    head: str = ""
    fixed: str = ""
    routers: tuple[str, ...] = ()

    @property
    def readers(self) -> tuple[str, ...]:
        """All linears [*, d] that read the stream."""
        return tuple(c for n in self.norms for c in n.consumers)


@dataclass(frozen=True)
class Rewrite:
    """A named rewrite.

    Attributes:
        name: registry key.
        apply: `(model, structure, **params) -> dict`, edits the model in place, says what it did as JSON-clean values.
        needs_batches: whether it takes calibration as `batches`, token ids [B, T] or dicts of keyword arguments, and a
            bar of tqdm's signature as `progress`.
        check: `(params) -> complaint`, "" if it can work with them.
    """

    name: str
    apply: Callable[..., dict[str, Any]]
    needs_batches: bool = False
    check: Callable[[dict], str] = lambda params: ""


REWRITES: Registry[Rewrite] = Registry("rewrite", "dq.rewrites")


def parameters(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """The named modules, their weights checked to be there and plain.

    Raises:
        DQError: naming the first that holds no data, or is quantized.
    """
    found = {n: model.get_submodule(n) for n in names}
    for name, module in found.items():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or not weight.is_floating_point():
            raise DQError(f"{name} holds no 16-bit weight: rewrite a model before it is quantized")
        if weight.is_meta:
            raise DQError(f"{name}.weight holds no data (offloaded, or not loaded yet): rewrite before offloading")
    return found


def check_rewrites(names: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Raises DQError for an unknown rewrite, a parameter that it does not take, or a value that it cannot work with."""
    for name, params in names:
        kind = REWRITES.get(name)
        for word in {"structure", "batches", "progress"} & set(params):
            raise DQError(f"rewrite {name!r} takes no parameter {word!r}: it is found from the model or calibration")
        check_params(f"rewrite {name!r}", kind.apply, params.items())
        complaint = kind.check(params)
        if complaint:
            raise DQError(f"rewrite {name!r} got {params}: {complaint}")


def rewrite(
    model: nn.Module,
    names: Sequence[str | tuple[str, dict[str, Any]]],
    structure: Structure | None = None,
    batches: Sequence[Tensor | dict[str, Any]] = (),
    progress: Callable[..., Any] | None = None,
) -> list[dict[str, Any]]:
    """Applies rewrites in the order given; returns what each did. `progress`: a bar of tqdm's signature for those that
    learn.

    Raises:
        DQError: as `check_rewrites`; one that learns without batches; a model that one of them does not fit.
    """
    pairs = [(n, {}) if isinstance(n, str) else (n[0], dict(n[1])) for n in names]
    check_rewrites(pairs)
    if structure is None:
        from dq.rewrites.decoder import decoder_structure

        structure = decoder_structure(model, plain=False)
    done = []
    for name, _ in pairs:
        if REWRITES.get(name).needs_batches and not len(batches):
            raise DQError(f"rewrite {name!r} learns from text: pass calibration")
    for name, params in pairs:
        kind = REWRITES.get(name)
        data = {"batches": batches, "progress": progress} if kind.needs_batches else {}
        done.append({"name": name, **kind.apply(model, structure, **params, **data)})
    return done
