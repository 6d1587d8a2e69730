"""Models of no known family: blocks, groups and skips guessed from structure and from the names the field uses."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

from torch import nn

from dq.family import DETECTORS, Family


def detect_family(model: nn.Module) -> Family:
    """A fallback for unknown models, from their structure: blocks, linears that share an input by the names the field
    uses (verified on values at calibration), and skips by name and place.

    Blocks are what the class names as repeated (`_repeated_blocks` of diffusers), and the outermost ModuleLists of two
    or more modules of one class. If they hold most of the weights, what stands outside stays in 16 bits.
    """
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    counts = Counter(_starred(b) for b in _detect_blocks(model, list(linears)))
    inputs = _detect_inputs(model, linears)
    family = Family("detected", blocks=tuple(counts), inputs=inputs, keep_outputs=True)
    inside = sum(m.weight.numel() for n, m in linears.items() if family.block_of(n))
    most = 2 * inside > sum(m.weight.numel() for m in linears.values())
    what = ", ".join(f"{pattern.removesuffix('.*')} ({n})" for pattern, n in counts.items()) or "none"
    skips, outside = ("by name and outside the blocks", "outside the repeated blocks") if most else ("by name", "")
    bound = 64 if getattr(getattr(model, "config", None), "vocab_size", None) else 256
    said = f"{type(model).__name__} is no known family. Assumed: repeated blocks {what}; {len(inputs)} groups of "
    said += f"linears sharing an input by their names; default skips {skips}."
    return replace(family, outside=outside, min_features=bound, assumed=said)


def _starred(name: str, once: bool = False) -> str:
    """The name with a star for every (or the first) index: one pattern per kind of block keeps plans fast."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name, count=int(once))


def _detect_blocks(model: nn.Module, linears: list[str]) -> list[str]:
    """Names of the repeated blocks that hold linears, none inside another."""
    kinds = set(getattr(model, "_repeated_blocks", None) or ())
    holding = {prefix for name in linears for prefix in _prefixes(name)}
    named = [n for n, m in model.named_modules() if n in holding and type(m).__name__ in kinds]
    around = {prefix for name in named for prefix in _prefixes(name)}
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    listed = (f"{n}.{i}" for n, m in lists if len({type(x) for x in m}) == 1 for i in range(len(m)))
    found = {*named, *(n for n in listed if n in holding and n not in around)}
    return [n for n, _ in model.named_modules() if n in found and not found.intersection(_prefixes(n))]


def _prefixes(name: str) -> list[str]:
    """What the module lies in: `a`, `a.b` of `a.b.c`."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


_SIBLINGS = (
    "to_q to_k to_v, add_q_proj add_k_proj add_v_proj, q_proj k_proj v_proj, query key value, "
    "to_query to_key to_value, gate_proj up_proj, gate up, w1 w3, linear_1 linear_3"
)


def _detect_inputs(model: nn.Module, linears: dict[str, nn.Linear]) -> tuple[tuple[str, ...], ...]:
    """Siblings by name with equal in_features, q of a cross-attention apart from its k and v."""
    classes, groups = {n: type(m).__name__ for n, m in model.named_modules()}, []
    leading = {words.split()[0]: words.split() for words in _SIBLINGS.split(", ")}
    for name in linears:
        parent, dot, leaf = name.rpartition(".")
        siblings = leading.get(leaf, ())
        if _reads_another(model.get_submodule(parent), parent, [classes[p] for p in _prefixes(name)[-2:]]):
            siblings = siblings[1:]
        members = [parent + dot + s for s in siblings if parent + dot + s in linears]
        if len(members) > 1 and len({linears[m].in_features for m in members}) == 1:
            groups.append(members)
    kinds = {tuple(_starred(m) for m in g) for g in groups}
    count = Counter(m for kind in kinds for m in kind)  # twice: one pattern for attentions of both sorts
    found = (tuple(_starred(m, max(count[_starred(x)] for x in g) > 1) for m in g) for g in groups)
    return tuple(dict.fromkeys(found))


def _reads_another(attention: nn.Module, name: str, classes: list[str]) -> bool:
    """Whether it is a cross-attention: attn2, or by the name or class of a module around it, or as `Attention` of
    diffusers says."""
    words = (name + "".join(classes)).lower()
    return any(w in words for w in ("attn2", "cross", "encdec")) or getattr(attention, "is_cross_attention", False)


DETECTORS.register(detect_family, "structure")
