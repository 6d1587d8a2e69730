"""A configuration of its own for a transformers model that is about to be called quantized.

`Model(config)` keeps the caller's object, and so do all modules in it: models built from one configuration share it,
and what is written there of one would be read of the others.
"""

from __future__ import annotations

import copy
import gc
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PretrainedConfig

Copies = dict[int, tuple[PretrainedConfig, PretrainedConfig]]  # by id: an object, which stays alive, and its copy


def own_config(model: nn.Module) -> None:
    """Gives a model a copy of its configuration, the same one in all of its modules, and not in other models that were
    built from the same object.

    What stands around the model (the whole that it is a part of, peft's wrapper) follows where it is found, so that
    there is one configuration for both; nothing that is saved depends on that (see dq.pipelines.hf_saving).
    """
    copies: Copies = {}
    for modules, always in ((list(model.modules()), True), (_around(model), False)):
        for module in modules:
            for name, config in held(module):
                vars(module)[name] = _copied(config, copies, always)


def held(owner: Any) -> list[tuple[str, PretrainedConfig]]:
    """The configurations among the attributes of a module or of another configuration."""
    return [(name, value) for name, value in list(vars(owner).items()) if isinstance(value, PretrainedConfig)]


def within(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """A configuration and those in it."""
    found = {id(config): config}
    for one in (queue := [config]):
        yield one
        new = [value for _, value in held(one) if id(value) not in found]
        found |= {id(value): value for value in new}
        queue.extend(new)


def _copied(config: PretrainedConfig, copies: Copies, always: bool) -> PretrainedConfig:
    """Its copy, with copies of those in it; itself if not `always` and nothing in it was copied."""
    if id(config) in copies:
        return copies[id(config)][1]
    new = copy.copy(config)  # a deep one would refuse what can be kept there, but not be copied
    copies[id(config)] = config, new
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            vars(new)[name] = _copied(value, copies, always)
            always = always or vars(new)[name] is not value
        elif isinstance(value, dict | list):
            vars(new)[name] = copy.deepcopy(value)
    if not always:
        copies[id(config)] = config, config
    return copies[id(config)][1]


def _around(model: nn.Module) -> list[nn.Module]:
    """The modules that have `model` somewhere below. No module knows its parents: all that are alive are looked
    through (a tenth of a second), but those that `gc.freeze` hides; dead ones may be among them."""
    parents = defaultdict(list)
    for found in gc.get_objects():
        if issubclass(type(found), nn.Module):
            for child in list((vars(found).get("_modules") or {}).values()):  # other threads build models meanwhile
                parents[id(child)].append(found)
    known = {id(model): model}
    for module in (queue := [model]):
        new = [p for p in parents[id(module)] if id(p) not in known]
        known |= {id(p): p for p in new}
        queue.extend(new)
    return queue[1:]
