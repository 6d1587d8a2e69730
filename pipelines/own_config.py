"""A configuration of its own for a transformers model that is about to be called quantized.

`Model(config)` keeps the caller's object, and so do all modules in it: models built from one configuration share it,
and what is written there of one would be saved with the others.
"""

from __future__ import annotations

import copy
import gc
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PretrainedConfig


def whole_of(model: nn.Module) -> nn.Module:
    """The outermost transformers model that `model` is a part of, as one configuration describes both; itself if none.

    That one is saved, too, and has to say what is quantized in its part.
    """
    models = [m for m in _around(model) if hasattr(type(m), "config_class")]  # their base class may not be imported yet
    holders = [m for m in models if _describes(m.config, model.config)]
    return holders[-1] if holders else model


def own_config(model: nn.Module) -> None:
    """Gives a model a copy of its configuration: the same one in all of its modules, and in what wraps it (peft's
    models), but not in other models that were built from the same object."""
    around = [m for m in _around(model) if any(_describes(c, model.config) for _, c in _held(m))]
    modules = {id(m): m for top in (model, *around) for m in top.modules()}
    copies: dict[int, Any] = {}
    for module in modules.values():
        for name, config in list(_held(module)):
            setattr(module, name, copy.deepcopy(config, copies))


def _held(module: nn.Module) -> Iterator[tuple[str, PretrainedConfig]]:
    """The configurations among a module's attributes."""
    return ((name, value) for name, value in vars(module).items() if isinstance(value, PretrainedConfig))


def _describes(config: PretrainedConfig, part: PretrainedConfig) -> bool:
    """Whether `part` is this object, or one within it."""
    return config is part or any(
        _describes(value, part) for value in vars(config).values() if isinstance(value, PretrainedConfig)
    )


def _around(model: nn.Module) -> list[nn.Module]:
    """The modules that have `model` somewhere below, inner ones first. No module knows its parents: all that are alive
    are looked through (a tenth of a second)."""
    parents = defaultdict(list)
    for found in gc.get_objects():
        if issubclass(type(found), nn.Module):
            for child in (vars(found).get("_modules") or {}).values():
                parents[id(child)].append(found)
    known = {id(model): model}
    for module in (queue := [model]):
        new = [p for p in parents[id(module)] if id(p) not in known]
        known |= {id(p): p for p in new}
        queue.extend(new)
    return queue[1:]
