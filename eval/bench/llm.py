"""Recipes on one language model beside each other: perplexity, KL to the 16-bit model, stored bits, seconds.

With `scramble` a model that was unpacked from a low-bit file is judged fairly. Its weights lie on that file's grid, and
a recipe with the same blocks finds them again without any error. The copy computes the same function: norm weights are
folded into the linears behind them, then the channels of the residual stream, of every head's values and of every MLP
are put into a random order; blocks along K no longer are the file's, outlier channels stay outliers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from dq.registry import DQError
from dq.rewrites import decoder_structure, rewrite
from dq.rewrites.norm_fusion import update
from dq.rewrites.quarot import Turn, fuse, moves

RECIPES = ("w4a16", "w4a16-gptq", "int8", "fp8", "w4a4-int4-quarot-gptq", "w4a4-nvfp4", "w4a4-nvfp4-arc")


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


def rows(result: Any, costs: dict[str, tuple[float | None, float | None]]) -> list[dict[str, Any]]:
    """One JSON-clean row per model: name, bits, seconds, and every score as {value, se, tokens}."""
    out = []
    for name, scores in result.scores.items():
        bits, seconds = costs.get(name, (None, None))
        row: dict[str, Any] = {"recipe": name, "bits": bits, "seconds": seconds}
        out.append(row | {k: {"value": s.value, "se": s.se, "tokens": s.tokens} for k, s in scores.items()})
    return out


def text(table: Iterable[dict[str, Any]], markdown: bool = False) -> str:
    """The rows as a table; scores as value ± standard error."""
    table = list(table)
    scores = list(dict.fromkeys(k for row in table for k, v in row.items() if isinstance(v, dict)))
    lines = [["recipe", "bits", "seconds", *scores]]
    lines += [[r["recipe"], _number(r["bits"], 2), _number(r["seconds"], 0), *(_score(r.get(k)) for k in scores)]
              for r in table]  # fmt: skip
    if markdown:
        head, *body = ["| " + " | ".join(line) + " |" for line in lines]
        return "\n".join([head, "|" + "---|" * len(lines[0]), *body]) + "\n"
    wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, wide)).rstrip() for line in lines)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _score(score: dict[str, Any] | None) -> str:
    if score is None:
        return "-"
    return f"{score['value']:.4g}" + ("" if score["se"] is None else f" ±{score['se']:.2g}")


def check_names(recipes: Sequence[str]) -> None:
    """Raises DQError if one stands twice: rows are found by their names."""
    for name in recipes:
        if list(recipes).count(name) > 1:
            raise DQError(f"recipe {name} is named twice")
