"""The structure of the decoders of transformers, read from the names of their modules.

Of a mixture every expert reads the stream and writes to it, as do the router and a gate on what a shared expert gives:
scaling and rotating commute with the weighted sum over experts, and a router that is rotated along chooses as before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from dq.registry import DQError
from dq.rewrites import Attention, Norm, Structure

_QKV, _UP = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",)), (("gate_proj", "up_proj"), ("gate_up_proj",))
_HEAD_NORMS = ("q_norm", "k_norm")
# Norms of a layer before attention and MLP; and beside these, after both (Gemma 2 and 3), on what is added.
_NORMS = ("input_layernorm", "post_attention_layernorm")
_SANDWICH = ("input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")


# What a mixture holds beside `experts`: what reads the stream to weigh them, and experts that every token takes.
_ROUTERS, _SHARED = ("gate", "router", "shared_expert_gate"), ("shared_expert", "shared_experts")


@dataclass
class _Layer:
    """Names in one layer: who makes q, k, v; who reads the norm before the MLP; who writes what the MLP adds."""

    qkv: list[str] = field(default_factory=list)
    readers: list[str] = field(default_factory=list)
    writers: list[str] = field(default_factory=list)
    routers: list[str] = field(default_factory=list)
    norms: tuple[str, ...] = _NORMS


def decoder_structure(model: nn.Module, plain: bool = True) -> Structure:
    """The structure of a transformers decoder with the module names of Llama, Mistral, Qwen2, Qwen3, Gemma, Mixtral,
    the Qwen mixtures and gpt-oss.

    Args:
        model: the experts of a mixture are linears of their own (dq.pipelines.experts opens stacked ones).
        plain: refuse what only some callers can take: q, k, v or gate, up in one linear (Phi-3), norms on the output of
            attention and MLP (Gemma 2 and 3), which fix the channels of the stream, and mixtures.

    Raises:
        DQError: no such model, or one with further norms or projections, or experts of another form, whose function a
            rewrite for these would change.
    """
    path = next((n for n, m in model.named_modules() if _is_layers(n, m)), None)
    if path is None:
        what = f"{type(model).__name__} has no decoder layers with self_attn and mlp"
        raise DQError(f"{what}: this rewrite is for decoder language models (diffusion models: w4a4-int4-convrot)")
    prefix, norms, writers, routers, attentions, fixed = path.removesuffix("layers"), [], [], [], [], ""
    for i, layer in enumerate(model.get_submodule(path)):
        at = f"{path}.{i}."
        found = _check_layer(layer, at, plain)
        norms += [Norm(at + found.norms[0], tuple(found.qkv)), Norm(at + found.norms[1], tuple(found.readers))]
        o = f"{at}self_attn.o_proj"
        writers += [o, *found.writers]
        routers += found.routers
        attentions.append(_attention(layer.self_attn, found.qkv[-1], o))
        if len(found.norms) > 2:
            fixed = f"{at}{found.norms[2]} scales what attention adds to the stream, channel by channel"
    head = next((n for n in ("lm_head", prefix + "lm_head") if _has(model, n)), "")
    norms.append(Norm(prefix + "norm", (head,) if head else ()))
    embedding = prefix + "embed_tokens"
    for name in (embedding, prefix + "norm"):
        if not _has(model, name):
            raise DQError(f"{type(model).__name__} has no {name}: give a Structure instead")
    width = model.get_submodule(embedding).weight.shape[1]
    return Structure(width, (embedding,), tuple(norms), tuple(writers), tuple(attentions), head, fixed, tuple(routers))


def _is_layers(name: str, module: nn.Module) -> bool:
    named = name.split(".")[-1] == "layers" and isinstance(module, nn.ModuleList) and len(module)
    return bool(named) and all(hasattr(m, "self_attn") and hasattr(m, "mlp") for m in module)


def _has(model: nn.Module, name: str) -> bool:
    return any(n == name for n, _ in model.named_modules())


def _check_layer(layer: nn.Module, at: str, plain: bool) -> _Layer:
    """Who reads and writes in a layer. Only known children may hold parameters: a further norm or projection changes
    the algebra."""
    out = _Layer()
    out.qkv, _ = _linears(layer.self_attn, f"{at}self_attn.", _QKV[: 1 if plain else 2], "o_proj", _HEAD_NORMS)
    if hasattr(layer.mlp, "experts") and not plain:
        _mixture(layer.mlp, f"{at}mlp.", out)
    else:
        _dense(layer.mlp, f"{at}mlp.", out, _UP[: 1 if plain else 2])
    if not plain and all(hasattr(layer, n) for n in _SANDWICH):
        out.norms = _SANDWICH
    _only(layer, {"self_attn", "mlp", *out.norms}, at)
    missing = [n for n in out.norms if not hasattr(layer, n)]
    if missing:
        raise DQError(f"{at.removesuffix('.')} has no {missing[0]}: give a Structure instead")
    return out


def _linears(module: nn.Module, at: str, ways, last: str, others=()) -> tuple[list[str], str]:
    """Names of the linears of the first of several ways to name them that is there, and of the last one."""
    way = next((w for w in ways if hasattr(module, w[0])), ways[0])
    for name in (*way, last):
        if not isinstance(getattr(module, name, None), nn.Linear):
            raise DQError(f"{at}{name} is no linear: give a Structure instead")
    _only(module, {*way, last, *others}, at)
    return [at + name for name in way], at + last


def _dense(module: nn.Module, at: str, out: _Layer, ways=_UP) -> None:
    readers, writer = _linears(module, at, ways, "down_proj")
    out.readers += readers
    out.writers.append(writer)


def _mixture(module: nn.Module, at: str, out: _Layer) -> None:
    """Routers, shared experts and experts of one layer."""
    experts = {n: m for n, m in module.experts.named_children() if n.isdigit()}
    if not experts:
        raise DQError(f"{at}experts holds no linears ({type(module.experts).__name__}): give a Structure instead")
    _only(module, {"experts", *_ROUTERS, *_SHARED}, at)
    _only(module.experts, set(experts), f"{at}experts.")
    for name in (n for n in _ROUTERS if hasattr(module, n)):
        router = getattr(module, name)
        strange = {n for n, p in router.named_parameters() if p.dim() > 1} - {"weight"}
        if strange or getattr(router, "weight", None) is None:
            raise DQError(f"{at}{name} is unknown to the rewrites of decoders: give a Structure instead")
        out.routers.append(at + name)
    out.readers += out.routers
    for name in (n for n in _SHARED if hasattr(module, n)):
        _dense(getattr(module, name), f"{at}{name}.", out)
    for name, expert in experts.items():
        _dense(expert, f"{at}experts.{name}.", out, (*_UP, ("up_proj",)))


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
