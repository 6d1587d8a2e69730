"""`Family`: what dq knows of one model architecture, as data: blocks, groups, what stays high precision and why."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator
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
# `(model) -> Family` for models of no registered class; one of the modules in that folder brings it.
DETECTORS: Registry[Callable[[nn.Module], Family]] = Registry("detector", "dq.pipelines.families")


def find_family(model: nn.Module) -> Family:
    """The registered family of the model's class, else one detected from its structure (and saying so)."""
    for family in FAMILIES:
        if type(model).__name__ in family.classes:
            return family
    return DETECTORS.get("structure")(model)


def matches(name: str, pattern: str) -> bool:
    """fnmatch over the whole name, or over any dotted suffix or inner path component (`to_out.0`, `ff`)."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(f".{name}.", f"*.{pattern}.*")
