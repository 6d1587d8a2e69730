"""`Family`: what dq knows of one model architecture, as data: blocks, groups, what stays high precision and why."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from torch import nn

from dq.registry import Registry

# Default skips by name, true for the diffusers families (each pattern with the reason the plan prints).
# Source: the module tables of SVDQuant, ViDiT-Q and diffusers' own layerwise-casting skips.
HIGH_PRECISION: tuple[tuple[str, str], ...] = (
    (r"(^|\.)[^.]*(embed[^.]*|emb)(\.|$)", "embedder"),
    (r"^(img_in|txt_in|proj_in|proj_out|proj_out_[12]|conv_in|conv_out)$", "input or output projection"),
    (r"(^|\.)lm_head$", "output projection"),
    (r"^norm_out", "final modulation"),
    (r"final_layer", "final layer"),
    (r"token_refiner", "text refiner"),
    (r"(^|\.)(router|shared_expert_gate|(mlp|moe|block_sparse_moe|feed_forward)\.gate)(\.|$)", "router of experts"),
    (r"time_emb_proj|time_proj", "timestep projection"),
    (r"adaln_single", "modulation shared by all blocks"),
    (r"caption_projection", "text projection"),
    (r"^(double|single)_stream_modulation", "modulation shared by all blocks"),
    (r"attentions\.\d+\.proj_(in|out)$", "block input or output projection"),
    (r"attn2\.(to_k|to_v|add_k_proj|add_v_proj)$", "cross-attention text key/value, constant over steps"),
)
MODULATION: tuple[str, ...] = (
    r"\.norm\w*\.linear(_\d)?$",
    r"\.\w+_mod\.\d+$",
    r"(?i)\.\w*(modulation|adaln)\w*(\.|$)",
)


@dataclass(frozen=True)
class Fold:
    """Where the division of an input by a smoothing factor can go, see dq.folding. Names are patterns as in `Family`.

    Attributes:
        kind: `modulation`: a linear that makes shift and scale of `LN(x) * (1 + scale) + shift`; `rows`: a linear whose
            rows are the input's channels (values of an attention, the linear half of a GLU); `norm`: an affine norm.
        consumers: all linears that read the input; it is exact only if every one of them has the same factor. Those
            that a model does not have are left out.
        producers: what makes the input, or parts of it along the tokens; those that a model does not have likewise.
        chunks: equal parts of a producer's rows, each as wide as the input or a whole fraction 1/m of it.
        at: the chunks to divide: (shift, scale), maybe several times, of a modulation; any number of a linear's, m of
            them in a row making up one input: `(2, 6, 7, 8)` of q, k, v and a fused GLU of width 3.
    """

    kind: str
    consumers: tuple[str, ...]
    producers: tuple[str, ...]
    chunks: int = 1
    at: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Family:
    """An architecture as data; all patterns are fnmatch patterns over module names, `*` standing for a block index.

    Attributes:
        name: key, e.g. `flux.1`.
        classes: class names of the models it describes; empty for the fallback.
        blocks: patterns of the repeated blocks, in no particular order (the order of calls is observed).
        inputs: tuples of linears that receive the same input and therefore share smoothing and rotation.
        smooth: tuples of linears that have different inputs but must share smoothing factors (a common channel basis).
        lowrank: tuples of linears that share the down factor of a low-rank branch.
        k_parts: linear -> linears whose out_features are the widths of the parts of its concatenated input; a last
            "..." stands for what is left of it.
        high_precision: (regex, reason) pairs, beside or instead of the default ones.
        wide: (regex, reason) pairs of linears that take 8 bits and stay in 16 in a recipe of fewer.
        outside: why linears outside all blocks stay in 16 bits, "" if they do not.
        modulation: regexes of linears that turn the timestep embedding into scales and shifts: weight-only.
        folds: where smoothing factors can be folded into what makes the input.
        keep_outputs: True if a block may read outputs of blocks before its predecessor (skip connections).
        min_features: the smallest side of a linear that is quantized, unless a recipe says otherwise.
        assumed: sentence printed with the plan when the family was guessed, else "".
    """

    name: str
    classes: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    inputs: tuple[tuple[str, ...], ...] = ()
    smooth: tuple[tuple[str, ...], ...] = ()
    lowrank: tuple[tuple[str, ...], ...] = ()
    k_parts: tuple[tuple[str, tuple[str, ...]], ...] = ()
    high_precision: tuple[tuple[str, str], ...] = HIGH_PRECISION
    wide: tuple[tuple[str, str], ...] = ()
    outside: str = ""
    modulation: tuple[str, ...] = MODULATION
    folds: tuple[Fold, ...] = ()
    keep_outputs: bool = False
    min_features: int = 256
    assumed: str = ""

    def keep_reason(self, name: str, bits: int = 8) -> str:
        """Why the linear stays in 16 bits where others get weights of `bits` bits, or ""."""
        patterns = self.high_precision + (self.wide if bits < 8 else ())
        why = next((why for pattern, why in patterns if re.search(pattern, name)), "")
        return why or (self.outside if self.outside and not self.block_of(name) else "")

    def is_modulation(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.modulation)

    def partners(self, groups: tuple[tuple[str, ...], ...], name: str) -> tuple[str, ...]:
        """The names that stand with `name` in one of `groups`, with the same block indices; just `name` if none."""
        for group in groups:
            for pattern in group:
                found = match_indices(pattern, name)
                if found is not None:
                    return tuple(fill(p, found) for p in group)
        return (name,)

    def block_of(self, name: str) -> str:
        """Name of the block that holds the module, or "" outside all blocks."""
        parts = name.split(".")
        for i in range(len(parts), 0, -1):
            prefix = ".".join(parts[:i])
            if any(match_indices(p, prefix) is not None for p in self.blocks):
                return prefix
        return ""

    def parts_of(self, name: str) -> tuple[str, ...]:
        """Linears whose widths split the input of `name`, or ()."""
        for pattern, parts in self.k_parts:
            found = match_indices(pattern, name)
            if found is not None:
                return tuple(fill(p, found) for p in parts)
        return ()

    def folds_in(self, names: Iterable[str]) -> Iterator[Fold]:
        """Every fold, once for each of the given modules that its first consumer matches, with its indices filled."""
        for fold, name in product(self.folds, list(names)):
            found = match_indices(fold.consumers[0], name)
            if found is not None:
                consumers, producers = (tuple(fill(p, found) for p in s) for s in (fold.consumers, fold.producers))
                yield replace(fold, consumers=consumers, producers=producers)


def match_indices(pattern: str, name: str) -> tuple[str, ...] | None:
    """What each `*` of the pattern stands for in `name` (one path component each), or None."""
    found = _compiled(pattern).fullmatch(name)
    return None if found is None else found.groups()


@lru_cache(4096)
def _compiled(pattern: str) -> re.Pattern:
    return re.compile(re.escape(pattern).replace(r"\*", r"([^.]+)"))


def fill(pattern: str, indices: tuple[str, ...]) -> str:
    """The pattern with its stars replaced in order."""
    for index in indices:
        pattern = pattern.replace("*", index, 1)
    return pattern


FAMILIES: Registry[Family] = Registry("family", "dq.pipelines.families")


def find_family(model: nn.Module) -> Family:
    """The registered family of the model's class, else one detected from its structure (and saying so)."""
    for family in FAMILIES:
        if type(model).__name__ in family.classes:
            return family
    return detect_family(model)


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


def matches(name: str, pattern: str) -> bool:
    """fnmatch over the whole name, or over any dotted suffix or inner path component (`to_out.0`, `ff`)."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(f".{name}.", f"*.{pattern}.*")
