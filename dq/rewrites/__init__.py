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
    """

    width: int
    embeddings: tuple[str, ...]
    norms: tuple[Norm, ...]
    writers: tuple[str, ...]
    attentions: tuple[Attention, ...] = ()
    head: str = ""
    fixed: str = ""

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

_QKV, _UP = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",)), (("gate_proj", "up_proj"), ("gate_up_proj",))
_HEAD_NORMS = ("q_norm", "k_norm")
# Norms of a layer before attention and MLP; and beside these, after both (Gemma 2 and 3), on what is added.
_NORMS = ("input_layernorm", "post_attention_layernorm")
_SANDWICH = ("input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")


def decoder_structure(model: nn.Module, plain: bool = True) -> Structure:
    """The structure of a transformers decoder with the module names of Llama, Mistral, Qwen2, Qwen3 and Gemma.

    Args:
        plain: refuse what only some rewrites can take: q, k, v or gate, up in one linear (Phi-3), and norms on the
            output of attention and MLP (Gemma 2 and 3), which fix the channels of the stream.

    Raises:
        DQError: no such model, or one with further norms, experts or projections, whose function a rewrite for these
            would change.
    """
    path = next((n for n, m in model.named_modules() if _is_layers(n, m)), None)
    if path is None:
        raise DQError(f"{type(model).__name__} has no decoder layers with self_attn and mlp: give a Structure instead")
    prefix, norms, writers, attentions, fixed = path.removesuffix("layers"), [], [], [], ""
    for i, layer in enumerate(model.get_submodule(path)):
        at = f"{path}.{i}."
        qkv, up, around = _check_layer(layer, at, plain)
        norms += [Norm(at + around[0], tuple(qkv)), Norm(at + around[1], tuple(up))]
        o, down = f"{at}self_attn.o_proj", f"{at}mlp.down_proj"
        writers += [o, down]
        attentions.append(_attention(layer.self_attn, qkv[-1], o))
        if len(around) > 2:
            fixed = f"{at}{around[2]} scales what attention adds to the stream, channel by channel"
    head = next((n for n in ("lm_head", prefix + "lm_head") if _has(model, n)), "")
    norms.append(Norm(prefix + "norm", (head,) if head else ()))
    embedding = prefix + "embed_tokens"
    for name in (embedding, prefix + "norm"):
        if not _has(model, name):
            raise DQError(f"{type(model).__name__} has no {name}: give a Structure instead")
    width = model.get_submodule(embedding).weight.shape[1]
    return Structure(width, (embedding,), tuple(norms), tuple(writers), tuple(attentions), head, fixed)


def _is_layers(name: str, module: nn.Module) -> bool:
    named = name.split(".")[-1] == "layers" and isinstance(module, nn.ModuleList) and len(module)
    return bool(named) and all(hasattr(m, "self_attn") and hasattr(m, "mlp") for m in module)


def _has(model: nn.Module, name: str) -> bool:
    return any(n == name for n, _ in model.named_modules())


def _check_layer(layer: nn.Module, at: str, plain: bool) -> tuple[list[str], list[str], tuple[str, ...]]:
    """Names of what makes q, k, v and gate, up, and of the norms. Only known children may hold parameters: a further
    norm, experts or a gate change the algebra."""
    linears = []
    for part, ways, last in (("self_attn", _QKV, "o_proj"), ("mlp", _UP, "down_proj")):
        module = getattr(layer, part)
        way = next((w for w in ways[: 1 if plain else 2] if hasattr(module, w[0])), ways[0])
        for name in (*way, last):
            if not isinstance(getattr(module, name, None), nn.Linear):
                raise DQError(f"{at}{part}.{name} is no linear: give a Structure instead")
        _only(module, {*way, last, *(_HEAD_NORMS if part == "self_attn" else ())}, f"{at}{part}.")
        linears.append([f"{at}{part}.{name}" for name in way])
    norms = _SANDWICH if not plain and all(hasattr(layer, n) for n in _SANDWICH) else _NORMS
    _only(layer, {"self_attn", "mlp", *norms}, at)
    missing = [n for n in norms if not hasattr(layer, n)]
    if missing:
        raise DQError(f"{at.removesuffix('.')} has no {missing[0]}: give a Structure instead")
    return *linears, norms


def _only(module: nn.Module, known: set[str], at: str) -> None:
    strange = {n for n, m in module.named_children() if any(True for _ in m.parameters())} - known
    if strange:
        raise DQError(f"{at}{min(strange)} is unknown to the rewrites of decoders: give a Structure instead")


def _attention(module: nn.Module, value: str, output: str) -> Attention:
    dim, full = getattr(module, "head_dim", None), module.o_proj.in_features
    fused = hasattr(module, "qkv_proj")
    kv = (module.qkv_proj.out_features - full) // 2 if fused else module.v_proj.out_features
    if not isinstance(dim, int) or kv % dim or full % dim or not kv or (full // dim) % (kv // dim):
        raise DQError(f"{value}: {kv} values and {full} inputs of {output} are no whole heads of {dim}")
    return Attention(value, output, full // dim, kv // dim, dim, full + kv if fused else 0)


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
    structure, done = structure or decoder_structure(model, plain=False), []
    for name, _ in pairs:
        if REWRITES.get(name).needs_batches and not len(batches):
            raise DQError(f"rewrite {name!r} learns from text: pass calibration")
    for name, params in pairs:
        kind = REWRITES.get(name)
        data = {"batches": batches, "progress": progress} if kind.needs_batches else {}
        done.append({"name": name, **kind.apply(model, structure, **params, **data)})
    return done
