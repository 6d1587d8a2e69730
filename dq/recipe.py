"""`Recipe`: ordered rules that say how each linear is quantized. A frozen value; TOML files are its form on disk."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from dq.registry import DQError, check_fields, check_params, suggest, typed
from dq.rewrites import REWRITES, check_rewrites
from dq.target import Target, named

PRESETS = Path(__file__).parent / "presets"


@dataclass(frozen=True)
class Rule:
    """Linears whose name matches the pattern take `target`; without a target they stay in 16 bits for `reason`."""

    match: str
    target: Target | None = None
    reason: str = "recipe"

    def __post_init__(self):
        check_fields(self)


@dataclass(frozen=True)
class Candidate:
    """One way to quantize a group, by a name for tables."""

    name: str
    target: Target


@dataclass(frozen=True)
class Auto:
    """Lets every group of ordinary linears take one of several targets, by measured error under a byte budget.

    Attributes:
        candidates: ordered; the first one is the yardstick of the printed table.
        bits: the budget: stored bits per weight over all these linears, everything counted; 0 takes what the first
            candidate would need.
        extra_bits: added to it.
        screen: a candidate that, rounded to nearest, has more than this many times the error of the best one that is
            not larger is not rounded further.
        records: calibration records on which the model's output is compared.
        rounds: how often groups are weighed; from the second time on beside the other groups' choices.
    """

    candidates: tuple[Candidate, ...]
    bits: float = 0.0
    extra_bits: float = 0.0
    screen: float = 2.0
    records: int = 4
    rounds: int = 1

    def __post_init__(self):
        check_fields(self)
        names = [typed(c, Candidate, "candidates are dq.recipe.Candidate values").name for c in self.candidates]
        if not names or len(set(names)) < len(names):
            raise DQError(f"auto needs candidates, each with a name of its own; got {', '.join(names) or 'none'}")
        finite, least = math.isfinite(self.bits + self.extra_bits), min(self.screen, self.records, self.rounds)
        if not (finite and self.bits >= 0 and 1 <= least < math.inf):
            raise DQError("auto takes finite bits of at least 0, and screen, records and rounds of at least 1")

    @property
    def needs_gram(self) -> bool:
        return any(c.target.needs_gram for c in self.candidates)

    @classmethod
    def from_dict(cls, data: Any) -> Auto:
        data = dict(typed(data, dict, "auto is a table: [auto] above bits = 5.0, then [[auto.candidates]]"))
        found = []
        for item in typed(data.pop("candidates", []), (list, tuple), "each candidate begins [[auto.candidates]]"):
            item = dict(typed(item, dict, "each candidate begins [[auto.candidates]]"))
            if "name" not in item:
                raise DQError("a candidate needs a name")
            found.append(Candidate(item.pop("name"), Target.from_dict(item)))
        unknown = set(data) - {f.name for f in fields(cls)}
        if unknown:
            known = [f.name for f in fields(cls)]
            raise DQError(f"unknown word {min(unknown)!r} in [auto]{suggest(min(unknown), known)}")
        return cls(candidates=tuple(found), **data)

    def to_dict(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "candidates"}
        return plain | {"candidates": [{"name": c.name, **c.target.to_dict()} for c in self.candidates]}


@dataclass(frozen=True)
class Reconstruct:
    """Learns the rounding of each block's linears together, against the block's output; see dq.reconstruct.

    Attributes:
        iters, lr, strength, warmup: of the learning.
        records: how many calls of the block it uses.
    """

    iters: int = 200
    lr: float = 0.1
    strength: float = 10.0
    warmup: float = 0.2
    records: int = 16

    def __post_init__(self):
        check_fields(self)
        learns = 0 < self.lr < math.inf and 0 <= self.strength < math.inf and 0 <= self.warmup < 1
        if self.iters < 1 or self.records < 1 or not learns:
            raise DQError(
                "reconstruct takes iters and records from 1, lr above 0, strength from 0 and warmup from 0 to below 1"
            )

    @property
    def settings(self) -> dict[str, Any]:
        """Of the learning."""
        return {k: v for k, v in vars(self).items() if k != "records"}

    @classmethod
    def from_dict(cls, data: Any) -> Reconstruct | None:
        if data is None:
            return None
        data = typed(data, dict, "reconstruct is a table, e.g. reconstruct = { iters = 200 }")
        unknown, known = set(data) - {f.name for f in fields(cls)}, [f.name for f in fields(cls)]
        if unknown:
            raise DQError(f"unknown word {min(unknown)!r} in reconstruct{suggest(min(unknown), known)}")
        return cls(**data)


@dataclass(frozen=True)
class Recipe:
    """How a model is quantized.

    Attributes:
        name, description: for people.
        linear: target of the ordinary linears.
        modulation: target of the linears that make scales and shifts from the timestep; None keeps them in 16 bits.
        rules: ordered; the first rule that matches a name wins over everything else.
        min_features: a linear with a side smaller than this stays in 16 bits ("too small to quantize"); None takes the
            family's bound: 64 in language models, whose keys and values are narrow and many, 256 elsewhere.
        conv: target of 2-D convolutions (of one group); None keeps them in 16 bits.
        multiple: so does one whose K is not a multiple of this; 1 lets every K pass (it is padded).
    """

    name: str
    linear: Target
    modulation: Target | None = None
    rules: tuple[Rule, ...] = ()
    min_features: int | None = None
    multiple: int = 1
    description: str = ""
    auto: Auto | None = None
    rewrites: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()
    reconstruct: Reconstruct | None = None
    conv: Target | None = None

    def __post_init__(self):
        check_fields(self)
        check_rewrites([(name, dict(params)) for name, params in self.rewrites])
        for rule in self.rules:
            typed(rule, Rule, "the rules of a recipe are dq.recipe.Rule values")
        if (self.min_features or 0) < 0 or self.multiple < 1:
            raise DQError(f"min_features is at least 0, multiple at least 1; got {self.min_features}, {self.multiple}")

    @property
    def _targets(self) -> list[Target]:
        return [t for t in (self.linear, self.modulation, self.conv, *(r.target for r in self.rules)) if t is not None]

    @property
    def corrects_bias(self) -> bool:
        """Whether some layer's bias may take up what its output loses on average."""
        targets = self._targets
        targets += [c.target for c in self.auto.candidates] if self.auto else []
        return any(t.bias_correction for t in targets)

    @property
    def needs_calibration(self) -> bool:
        batches = any(REWRITES.get(name).needs_batches for name, _ in self.rewrites)
        whole = self.auto is not None or self.reconstruct is not None
        return batches or whole or any(t.needs_calibration for t in self._targets)

    def with_(self, **changes: Any) -> Recipe:
        """A copy with some fields changed, e.g. `recipe.with_(min_features=16)`."""
        check_params("a recipe", type(self).__init__, changes.items())
        return replace(self, **changes)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Recipe:
        data = dict(data)
        unknown = set(data) - {f.name for f in fields(cls)}
        if unknown:
            raise DQError(f"unknown recipe word {min(unknown)!r}{suggest(min(unknown), [f.name for f in fields(cls)])}")
        auto = None if data.get("auto") is None else Auto.from_dict(data.pop("auto"))
        if auto is not None and "linear" not in data:
            data["linear"] = auto.candidates[0].target.to_dict()
        if "name" not in data or "linear" not in data:
            raise DQError("a recipe needs a name and a [linear] section")
        modulation, conv = data.pop("modulation", None), data.pop("conv", None)
        return cls(
            linear=Target.from_dict(data.pop("linear")),
            modulation=None if modulation is None else Target.from_dict(modulation),
            conv=None if conv is None else Target.from_dict(conv),
            rules=tuple(_rule(r) for r in typed(data.pop("rules", []), (list, tuple), "each rule begins [[rules]]")),
            auto=auto,
            reconstruct=Reconstruct.from_dict(data.pop("reconstruct", None)),
            rewrites=named(data.pop("rewrites", []), "rewrite", "rewrites is a list of names or tables"),
            **data,
        )

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"name": self.name, "description": self.description, "linear": self.linear.to_dict()}
        if self.modulation is not None:
            out["modulation"] = self.modulation.to_dict()
        if self.conv is not None:
            out["conv"] = self.conv.to_dict()
        if self.rules:
            out["rules"] = [
                {"match": r.match} | ({"keep": r.reason} if r.target is None else r.target.to_dict())
                for r in self.rules
            ]
        if self.rewrites:
            out["rewrites"] = [{"name": n, **dict(p)} for n, p in self.rewrites]
        if self.auto is not None:
            out["auto"] = self.auto.to_dict()
        if self.reconstruct is not None:
            out["reconstruct"] = vars(self.reconstruct).copy()
        bound = {} if self.min_features is None else {"min_features": self.min_features}
        return out | bound | {"multiple": self.multiple}

    @classmethod
    def load(cls, recipe: str | Path | Recipe) -> Recipe:
        """A preset by name, a TOML file by path, or a Recipe as it is.

        Raises:
            DQError: unknown preset (near names are suggested) or a file that is no recipe.
        """
        what = "a recipe is the name of a preset, the path of a .toml file or a dq.Recipe (of a dict: Recipe.from_dict)"
        if isinstance(typed(recipe, (str, Path, Recipe), what), Recipe):
            return recipe
        path = Path(recipe)
        if path.suffix != ".toml":
            if str(recipe) not in presets():
                raise DQError(f"unknown recipe {str(recipe)!r}{suggest(str(recipe), presets())} (dq list recipes)")
            path = PRESETS / f"{recipe}.toml"
        try:
            return cls.from_dict(tomllib.loads(path.read_text(encoding="utf-8-sig")))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, DQError) as error:
            raise DQError(f"cannot read the recipe {path}: {error}") from error


def _rule(data: dict[str, Any]) -> Rule:
    data = dict(typed(data, dict, "a recipe rule is a table"))
    if "match" not in data:
        raise DQError("a recipe rule needs match = 'pattern'")
    match, keep = data.pop("match"), data.pop("keep", None)
    if keep is None:
        return Rule(match, Target.from_dict(data))
    if data or not keep or not isinstance(keep, str | bool):
        raise DQError(f"keep = 'the reason' leaves {match!r} in 16 bits, without any other word; got {keep!r}, {data}")
    return Rule(match) if keep is True else Rule(match, None, keep)


def presets(decoders: bool = True) -> list[str]:
    """Names of the recipes that come with dq; without `decoders` only those that rewrite no model and so fit any."""
    names = sorted(p.stem for p in PRESETS.glob("*.toml"))
    return names if decoders else [n for n in names if not Recipe.load(n).rewrites]
