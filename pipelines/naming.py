"""Names of the original checkpoints: what a diffusers model is called in the single file that its authors publish.

ComfyUI and Black Forest Labs read those. They differ from diffusers' in three ways: modules have other names; matrices
that read one input are rows of one matrix (q, k, v in that order); and where diffusers' final modulation gives scale,
shift the original gives shift, scale. One file in `names/` describes one architecture; what it says is tested against
diffusers' own converter from the original names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dq.family import fill, match_indices
from dq.registry import DQError, Registry


@dataclass(frozen=True)
class Rule:
    """One module (or bare parameter) there and its members here. Names are patterns, `*` standing for one component.

    Attributes:
        original: its name there.
        members: its names here; several are the rows of one matrix, in this order.
        swap: the two halves of its rows change places.
        leaf: what its `weight` is called there.
    """

    original: str
    members: tuple[str, ...]
    swap: bool = False
    leaf: str = "weight"


@dataclass(frozen=True)
class Naming:
    """The original names of one architecture.

    Attributes:
        name: registry key.
        classes: diffusers classes that it describes.
        rules: the first that matches counts.
        rest: what no rule names is called the same there; else a model that has such parameters is not described.
        swap_last: patterns of members here whose halves change places in the last block alone.
        has, lacks: modules here that a model of this form holds, or does not, where a class has several forms. One of
            no known form is not described.
    """

    name: str
    classes: tuple[str, ...]
    rules: tuple[Rule, ...]
    rest: bool = False
    swap_last: tuple[str, ...] = ()
    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()

    def fits(self, model: nn.Module) -> bool:
        """Whether it describes this model."""
        if type(model).__name__ not in self.classes:
            return False
        modules = {n for n, _ in model.named_modules()} if self.has or self.lacks else set()
        return modules.issuperset(self.has) and modules.isdisjoint(self.lacks)


NAMINGS: Registry[Naming] = Registry("naming", "dq.pipelines.names")


def renames(pairs: Mapping[str, str], **more: object) -> tuple[Rule, ...]:
    """Rules of one member each: name there -> name here."""
    return tuple(Rule(there, (here,), **more) for there, here in pairs.items())


def stems(model: nn.Module) -> list[str]:
    """Whatever has one name: modules without children, and parameters or buffers of modules with children."""
    out: dict[str, None] = {}
    for key in model.state_dict():
        owner = key.rpartition(".")[0]
        out[owner if owner and not any(model.get_submodule(owner).children()) else key] = None
    return list(out)


def entries(model: nn.Module) -> tuple[Rule, ...] | None:
    """The rules of the model's naming with their stars filled, one for every module there; None if it has no naming.

    Raises:
        DQError: the model has parameters that its naming does not know, or only a part of the rows of a matrix.
    """
    naming = next((n for n in NAMINGS if n.fits(model)), None)
    if naming is None:
        return None
    here, found = stems(model), {}
    for name in here:
        rule = next(_filled(naming.rules, name), None)
        if rule is None and not naming.rest:
            raise DQError(f"{name} has no name in the original checkpoints of {naming.name}")
        rule = rule or Rule(name, (name,))
        found[rule.original] = rule
    last = {_last(pattern, here) for pattern in naming.swap_last}
    for key, rule in found.items():
        missing = [m for m in rule.members if m not in here]
        if missing:
            raise DQError(f"{missing[0]} is missing, whose rows belong to {rule.original}")
        found[key] = replace(rule, swap=rule.swap or rule.members[0] in last)
    return tuple(found.values())


def _last(pattern: str, names: Iterable[str]) -> str:
    """The name of the highest block index that matches; "" if none does."""
    found = {n: i for n in names if (i := match_indices(pattern, n)) is not None}
    return max(found, key=lambda n: int(found[n][0]), default="")


def _filled(rules: Iterable[Rule], name: str) -> Iterator[Rule]:
    """Every rule that has a member of this name, its stars filled."""
    for rule in rules:
        for member in rule.members:
            indices = match_indices(member, name)
            if indices is not None:
                members = tuple(fill(m, indices) for m in rule.members)
                yield Rule(fill(rule.original, indices), members, rule.swap, rule.leaf)


def swap_halves(tensor: Tensor) -> Tensor:
    """Rows [2 n, ..]: the second half first."""
    first, second = tensor.chunk(2)
    return torch.cat([second, first])


def to_original(rule: Rule, leaf: str, parts: Sequence[Tensor]) -> tuple[str, Tensor]:
    """The name and the tensor there of one leaf (`weight`, `bias`; "" for a bare parameter) of all members."""
    tensor = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
    name = f"{rule.original}.{rule.leaf if leaf == 'weight' else leaf}" if leaf else rule.original
    return name, swap_halves(tensor) if rule.swap else tensor


def from_original(rule: Rule, tensors: dict[str, Tensor], here: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Takes the tensors of one rule out of `tensors` and gives them their names here.

    Args:
        here: the model's state: which leaves its members have, and how many rows.
    """
    out = {}
    first = rule.members[0]
    leaves = [""] if first in here else [k.removeprefix(f"{first}.") for k in here if k.rpartition(".")[0] == first]
    for leaf in leaves:
        names = [f"{m}.{leaf}" if leaf else m for m in rule.members]
        there = to_original(rule, leaf, [torch.empty(0)])[0]
        if there not in tensors or any(n not in here for n in names):
            continue
        tensor = tensors.pop(there)
        tensor = swap_halves(tensor) if rule.swap else tensor
        sizes = [here[n].shape[0] for n in names] if len(names) > 1 else None
        out |= dict(zip(names, tensor.split(sizes) if sizes else (tensor,), strict=True))
    return out
