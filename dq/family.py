"""`Family`: what dq knows of one model architecture, as data: blocks, groups, what stays high precision and why."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from torch import nn

from dq.registry import Registry

# Default skips by name, true for the diffusers families (each pattern with the reason the plan prints).
# Source: the module tables of SVDQuant, ViDiT-Q and diffusers' own layerwise-casting skips.
HIGH_PRECISION: tuple[tuple[str, str], ...] = (
    (r"(^|\.)[^.]*embed[^.]*(\.|$)", "embedder"),
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
    r"\.norm1\.linear$",
    r"\.norm1_context\.linear$",
    r"^single_transformer_blocks\.\d+\.norm\.linear$",
    r"\.(img|txt)_mod\.1$",
    r"\.adaLN_modulation\.\d+$",
)


@dataclass(frozen=True)
class Fold:
    """Where the division of an input by a smoothing factor can go, see dq.folding. Names are patterns as in `Family`.

    Attributes:
        kind: `modulation`: a linear that makes shift and scale of `LN(x) * (1 + scale) + shift`; `rows`: a linear whose
            rows are the input's channels (values of an attention, the linear half of a GLU); `norm`: an affine norm.
        consumers: all linears that read the input; it is exact only if every one of them has the same factor.
        producers: what makes the input, or parts of it along the tokens.
        chunks: equal parts of a producer's rows, each as wide as the input.
        at: the chunks to divide: (shift, scale) of a modulation, any number of a linear's.
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
    modulation: tuple[str, ...] = MODULATION
    folds: tuple[Fold, ...] = ()
    keep_outputs: bool = False
    min_features: int = 256
    assumed: str = ""

    def keep_reason(self, name: str) -> str:
        """Why the linear stays in 16 bits, or ""."""
        return next((why for pattern, why in self.high_precision if re.search(pattern, name)), "")

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
    regex = re.escape(pattern).replace(r"\*", r"([^.]+)")
    found = re.fullmatch(regex, name)
    return None if found is None else found.groups()


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
    """A fallback for unknown models: repeated blocks are the outermost ModuleLists of two or more modules of one class.

    q/k/v and gate/up linears are grouped by the names the field uses. Verified on values at calibration.
    """
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) > 1
        and len({type(m) for m in module}) == 1
        and any(isinstance(m, nn.Linear) for m in module.modules())
    ]
    outer = tuple(n for n in lists if not any(n != o and n.startswith(o + ".") for o in lists))
    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    inputs = _detect_inputs(model, linears)
    what = ", ".join(f"{n} ({len(model.get_submodule(n))})" for n in outer) or "none"
    return Family(
        name="detected",
        blocks=tuple(f"{n}.*" for n in outer),
        inputs=inputs,
        keep_outputs=True,
        min_features=64 if getattr(getattr(model, "config", None), "vocab_size", None) else 256,
        assumed=f"{type(model).__name__} is no known family. Assumed: repeated blocks {what}; "
        f"{len(inputs)} groups of linears sharing an input by their names; default skips by name.",
    )


_SIBLINGS = (
    ("to_q", "to_k", "to_v"),
    ("add_q_proj", "add_k_proj", "add_v_proj"),
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)


def _detect_inputs(model: nn.Module, linears: list[str]) -> tuple[tuple[str, ...], ...]:
    """Siblings by name with equal in_features. Cross-attention (a key of another width, or attn2) keeps q apart."""
    known, groups = set(linears), []
    for name in linears:
        parent, _, leaf = name.rpartition(".")
        prefix = parent + "." if parent else ""
        for siblings in _SIBLINGS:
            if leaf != siblings[0]:
                continue
            cross = "attn2" in parent or "cross" in parent or "encdec" in parent.lower()
            members = [prefix + s for s in (siblings[1:] if cross else siblings) if prefix + s in known]
            widths = {model.get_submodule(m).in_features for m in members}
            if len(members) > 1 and len(widths) == 1:
                groups.append(tuple(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", m) for m in members))
    return tuple(dict.fromkeys(groups))  # one pattern per kind of block, not one tuple per block: plans stay fast


def matches(name: str, pattern: str) -> bool:
    """fnmatch over the whole name, or over any dotted suffix or inner path component (`to_out.0`, `ff`)."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(f".{name}.", f"*.{pattern}.*")
