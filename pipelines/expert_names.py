"""What the files of a mixture call the linears of its experts, for exports: `block_sparse_moe.experts.3.w1` of Mixtral
is `mlp.experts.3.gate_proj` in memory. transformers says so by the conversions with which it merges files into stacked
tensors; here the same data is read for experts that stay apart."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dq.pipelines.experts import opened_layers, stacked_layers

_PART = re.compile(r"^(.*\.experts\.\d+\.)(\w+)(.*)$")


def parts(model: nn.Module) -> dict[str, str]:
    """Name in memory of an expert's linear (`gate_proj`, `up_proj`, `down_proj`) -> name in files."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    out = {}
    for c in get_model_conversion_mapping(model, add_legacy=False):
        if not isinstance(c, WeightConverter) or not any("experts" in t for t in c.target_patterns):
            continue
        last = [re.sub(r"\W*weight\W*$", "", s).rpartition(".")[2] for s in c.source_patterns]
        mine = ("gate_proj", "up_proj") if len(last) == 2 else ("down_proj",)
        out |= dict(zip(mine, last, strict=False))
    return out


def to_files(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """The entries with the parts of opened experts under the names of the files."""
    if not opened_layers(model):
        return state
    known = parts(model)
    return {_renamed(key, known): value for key, value in state.items()}


def file_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Name of a linear in memory -> in files."""
    from transformers.core_model_loading import revert_weight_conversion

    names = list(names)
    places = to_files(model, {n: torch.tensor(i) for i, n in enumerate(names)})
    return {names[int(i)]: n for n, i in revert_weight_conversion(model, places).items()}


def from_files(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Name in files -> in memory, of linears or tensors; the model holds no data and its experts are stacked."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    known = {file: part for part, file in parts(model).items()} if stacked_layers(model) else {}
    renamings = [c for c in get_model_conversion_mapping(model) if isinstance(c, WeightRenaming)]
    out = {}
    for name in names:
        found = name
        for renaming in renamings:
            found = renaming.rename_source_key(found)[0]
        out[name] = _renamed(found, known)
    return out


def _renamed(name: str, known: dict[str, str]) -> str:
    found = _PART.match(name)
    return f"{found[1]}{known.get(found[2], found[2])}{found[3]}" if found else name


def of_experts(names: Iterable[str]) -> list[str]:
    """Those that are linears of an expert."""
    return [n for n in names if _PART.match(n)]


def unlisted(state: dict[str, Tensor], modules: Iterable[str]) -> list[str]:
    """Matrices that only the files name, such as experts that are one tensor in memory."""
    known = set(modules)
    found = (n.removesuffix(".weight") for n, t in state.items() if n.endswith(".weight") and t.dim() == 2)
    return [n for n in found if n not in known]
