"""One language model in many forms beside each other: the copy that is judged, a cache in the loop, the table.

With `scramble` a model that was unpacked from a low-bit file is judged fairly. Its weights lie on that file's grid, and
a recipe with the same blocks finds them again without any error. The copy computes the same function: norm weights are
folded into the linears behind them, then the channels of the residual stream, of every head's values and of every MLP
are put into a random order; blocks along K no longer are the file's, outlier channels stay outliers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from dq.eval.perplexity import ratio
from dq.rewrites import rewrite
from dq.rewrites.decoder import decoder_structure
from dq.rewrites.norm_fusion import update
from dq.rewrites.quarot import Turn, fuse, moves


def scramble(model: nn.Module, seed: int = 0) -> nn.Module:
    """Turns the model, in place, into the copy described above; a tied head gets a weight of its own.

    Raises:
        DQError: a layout that is not known, or norms that are not RMSNorms.
    """
    generator = torch.Generator().manual_seed(seed)
    structure = decoder_structure(model)
    rewrite(model, ["norm_fusion"], structure)

    def shuffle(width: int) -> Turn:
        order = torch.randperm(width, generator=generator)
        return lambda t: t[..., order.to(t.device)]

    values = [shuffle(a.head_dim) for a in structure.attentions]
    fuse(model, moves(structure, r1=shuffle(structure.width), r2=values))
    for name in structure.writers:
        if not name.endswith("down_proj"):
            continue
        down = model.get_submodule(name)
        turn = shuffle(down.in_features)
        update(down.weight, turn)
        for part in ("gate_proj", "up_proj"):
            linear = model.get_submodule(name.replace("down_proj", part))
            update(linear.weight, lambda w, turn=turn: turn(w.T).T)
            if linear.bias is not None:
                update(linear.bias, turn)
    return model


WIDE = 40  # characters of a cell that others are not made as wide as


class Cached(nn.Module):
    """A decoder that attends to keys and values as a cache of few bits stores them, in one call over a whole window.

    Attributes:
        caches: a function that makes an empty cache.
        last: the cache of the newest call.
        sequences: in that call.
    """

    def __init__(self, model: nn.Module, caches: Callable[[], Any], keyword: str):
        super().__init__()
        self.model, self.caches, self.keyword, self.last, self.sequences = model, caches, keyword, None, 0

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def forward(self, input_ids: Tensor, use_cache: bool = True) -> Any:
        self.last, self.sequences = self.caches(), len(input_ids)
        return self.model(input_ids=input_ids, use_cache=True, **{self.keyword: self.last})


def cache_cost(cache: Any, sequences: int = 1) -> tuple[float, float]:
    """(bits per value, bytes of one sequence) of a `KVCache`; what its window holds in full counts as 16 bits."""
    sides = [side for layer in cache.layers for side in layer.sides]
    recent = [s.recent for s in sides if s.recent is not None]
    size = cache.nbytes - sum(t.numel() * (t.element_size() - 2) for t in recent)
    return 8 * size / max(1, sum(layer.values_held() for layer in cache.layers)), size / sequences


def row(name: str, scores: Mapping[str, Any], **costs: Any) -> dict[str, Any]:
    """One JSON-clean row of the table: every score as {value, se, tokens, sums}, and bits, MB, seconds or `failed`."""
    base = {"recipe": name, "bits": None, "mb": None, "seconds": None} | costs
    return base | {k: asdict(s) | {"sums": list(s.sums)} for k, s in scores.items()}


def ratios(table: Iterable[dict[str, Any]], pairs: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    """KL of one row over that of another, of the pairs that are both there: {recipe, of, score, value, se}."""
    rows, out = {r["recipe"]: r for r in table}, []
    for a, b in pairs:
        for key in (k for k in rows.get(a, {}) if k.startswith("kl[") and k in rows.get(b, {})):
            both = [rows[n][key].get("sums") for n in (a, b)]  # a file of an earlier version holds none
            if all(both):
                value, se = ratio(*both)
                out.append({"recipe": a, "of": b, "score": key, "value": value, "se": se})
    return out


def text(table: Iterable[dict[str, Any]], markdown: bool = False) -> str:
    """The rows as a table; scores as value ± standard error, of what failed the reason."""
    table = list(table)
    scores = list(dict.fromkeys(k for row in table for k, v in row.items() if isinstance(v, dict)))
    lines = [["recipe", "bits", "MB", "seconds", *scores]]
    for r in table:
        name = f"{r['recipe']}: {r['failed']}" if r.get("failed") else r["recipe"]
        costs = (_number(r["bits"], 2), _number(r["mb"], 1), _number(r["seconds"], 0))
        lines.append([name, *costs, *(_score(r.get(k)) for k in scores)])
    if markdown:
        head, *body = ["| " + " | ".join(line) + " |" for line in lines]
        return "\n".join([head, "|" + "---|" * len(lines[0]), *body]) + "\n"
    wide = [max(len(c) for c in column if len(c) < WIDE or len(column) == 2) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, wide)).rstrip() for line in lines)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _score(score: dict[str, Any] | None) -> str:
    if score is None:
        return "-"
    return f"{score['value']:.4g}" + ("" if score["se"] is None else f" ±{score['se']:.2g}")
