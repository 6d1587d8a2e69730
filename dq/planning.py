"""`Plan`: what a recipe will do to a model, from names and shapes alone: printable, comparable, with estimates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from dq.conv import size
from dq.family import Family, find_family, matches
from dq.linear import LinearConfig, QuantizedLinear
from dq.plan_text import idle_rules, plan_lines, size_text
from dq.recipe import Recipe, Target
from dq.registry import DQError, suggest, typed
from dq.transforms import TRANSFORMS, Planned

# Nanoseconds per weight element on two CPU cores, measured on a decoder of width 576; a GPU is far faster. Of
# transforms and roundings, and of scale rules that try more than one scale.
_COST = {"rtn": 25.0, "gptq": 280.0, "smooth": 40.0, "search": 400.0, "awq": 400.0, "lowrank": 250.0, "rotate": 10.0,
         "arc": 60.0}  # fmt: skip
_RULE = {"mse": 220.0, "sweep": 45.0, "weighted_sweep": 60.0, "local_hessian": 100.0, "awq": 70.0, "imatrix": 40.0}


@dataclass(frozen=True)
class PlanRow:
    """One group of linears that is transformed together, or one linear that stays in 16 bits.

    Attributes:
        members: module names.
        shapes: (N, K) of each.
        block: name of the block that holds them, "" outside all blocks.
        inputs: members by shared input.
        lowrank: members by shared down factor.
        k_parts: widths of the parts of a concatenated input.
        target: None keeps 16 bits.
        reason: why it stays in 16 bits, or a remark.
        bias: whether each member has one.
    """

    members: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    block: str = ""
    inputs: tuple[tuple[str, ...], ...] = ()
    lowrank: tuple[tuple[str, ...], ...] = ()
    k_parts: tuple[int, ...] = ()
    target: Target | None = None
    reason: str = ""

    @property
    def elements(self) -> int:
        return sum(n * k for n, k in self.shapes)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights after quantization (codes, scales, side factors, run-time tensors)."""
        if self.target is None:
            return 2 * self.elements
        return sum(_layer_bytes(shape, self) for shape in self.shapes)

    @property
    def seconds(self) -> float:
        """Rough time on two CPU cores."""
        return 0.0 if self.target is None else self.cost(self.target)

    def cost(self, target: Target) -> float:
        """Rough seconds to quantize the row as `target` says."""
        searched = any(dict(params).get("search") for _, params in target.transforms)
        names = [n for n, _ in target.transforms] + [target.rounding] + ["search"] * searched
        each = sum(_COST.get(n, 100.0) for n in names) + _RULE.get(target.weights.scale_rule, 0.0)
        return self.elements * 1e-9 * each


def subset(row: PlanRow, inputs: tuple[tuple[str, ...], ...]) -> PlanRow:
    """The part of a row that has these inputs."""
    members = tuple(m for i in inputs for m in i)
    shapes = tuple(row.shapes[row.members.index(m)] for m in members)
    lowrank = tuple(t for t in (tuple(m for m in s if m in members) for s in row.lowrank) if t)
    return replace(row, members=members, shapes=shapes, inputs=inputs, lowrank=lowrank)


def _planned(shape: tuple[int, int], row: PlanRow) -> list[Planned]:
    kinds = ((TRANSFORMS.get(name), dict(params)) for name, params in row.target.transforms)
    return [kind.plan(shape, row.k_parts, params, row.members[0]) for kind, params in kinds]


def planned_config(shape: tuple[int, int], row: PlanRow) -> LinearConfig:
    """The config that the transforms of this row will end in (a searched smoothing may come out as none)."""
    found = _planned(shape, row)
    return LinearConfig(
        row.target.weights,
        row.target.activations,
        tuple(step for p in found for step in p.steps),
        sum(p.rank for p in found),
        residual=max((p.residual for p in found), default=0),
        dual=any(p.dual for p in found),
        step_groups=row.target.step_groups,
    )


def _layer_bytes(shape: tuple[int, int], row: PlanRow) -> int:
    tensors = planned_config(shape, row).tensors(*shape)
    return sum(int(torch.Size(s).numel()) * d.itemsize for s, d in tensors.values())


@dataclass(frozen=True)
class Plan:
    """All rows for one model; `print(plan)` shows them with one line per kind of group."""

    model: str
    recipe: Recipe
    family: Family
    rows: tuple[PlanRow, ...]
    other_bytes: int = 0
    remarks: tuple[str, ...] = field(default=())

    @property
    def quantized(self) -> tuple[PlanRow, ...]:
        return tuple(r for r in self.rows if r.target is not None)

    @property
    def bytes_before(self) -> int:
        """Bytes of the 16-bit model."""
        return self.other_bytes + sum(2 * r.elements for r in self.rows)

    @property
    def bytes_after(self) -> int:
        return self.other_bytes + sum(r.nbytes for r in self.rows) + self._spare

    @property
    def _spare(self) -> int:
        """Bytes that an `auto` recipe may spend beyond its first candidate."""
        auto, free = self.recipe.auto, [r for r in self.rows if r.target == self.recipe.linear]
        if auto is None or not free:
            return 0
        elements, first = sum(r.elements for r in free), sum(r.nbytes for r in free)
        return int((auto.bits * elements / 8 or first) - first + auto.extra_bits * elements / 8)

    @property
    def seconds(self) -> float:
        """Rough seconds to quantize on two CPU cores, calibration runs of the pipeline not counted."""
        tried = self.recipe.auto.candidates if self.recipe.auto else ()
        free = [r for r in self.rows if r.target == self.recipe.linear] if tried else []
        return sum(r.seconds for r in self.rows) + sum(r.cost(c.target) for r in free for c in tried)

    @property
    def peak_bytes(self) -> int:
        """Rough peak memory beside the records: the 16-bit model, the finished layers (on the CPU until all are done),
        and the largest group in float32 working copies."""
        finished = sum(r.nbytes for r in self.quantized)
        return self.bytes_before + finished + 6 * 4 * max((r.elements for r in self.quantized), default=0)

    def blocks(self) -> list[str]:
        """Names of the blocks with something to quantize, "" (outside all blocks) last."""
        names = list(dict.fromkeys(r.block for r in self.quantized))
        return [n for n in names if n] + [n for n in names if not n]

    def __str__(self) -> str:
        return "\n".join(plan_lines(self))


def model_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers; 32-bit parameters count as the 16 bits they would be shipped in."""
    params = sum(p.numel() * min(p.element_size(), 2) for p in model.parameters())
    return params + sum(b.numel() * b.element_size() for b in model.buffers())


def _other_tool(model: nn.Module) -> str:
    """The method by which diffusers or transformers say that another tool quantized a model; "" if none did. GGUF
    does not count: its weights have been unpacked, or are refused where they are not."""
    method = getattr(model, "quantization_method", None)
    word = str(getattr(method, "value", method) or "")
    return "" if word in ("dq", "gguf") else word


def make_plan(model: nn.Module, recipe: str | Recipe, skip: Sequence[str] = ()) -> Plan:
    """What `recipe` will do to `model`.

    Args:
        skip: fnmatch patterns of linears that stay in 16 bits (over the whole name, or any run of its components).

    Raises:
        DQError: the model is quantized already, a skip pattern matches no linear, or nothing would be quantized.
    """
    recipe = Recipe.load(recipe)
    name = type(model).__name__
    if any(isinstance(m, QuantizedLinear) for m in model.modules()):
        raise DQError(f"{name} is quantized already; dq.dequantize() it or load the 16-bit model first")
    other = _other_tool(model)
    if other:
        raise DQError(f"{name} is quantized by {other} already: load the 16-bit model, or dequantize it while loading")
    if isinstance(model, nn.Linear):
        raise DQError(f"a lone {name} has no name to be replaced by: put it into a model, e.g. nn.Sequential(layer)")
    linears = {n: m for n, m in model.named_modules() if type(m) is nn.Linear or (recipe.conv and type(m) is nn.Conv2d)}
    kinds = sorted({type(m).__name__ for m in model.modules() if isinstance(m, nn.Linear) and type(m) is not nn.Linear})
    others = [f"subclasses of nn.Linear stay in 16 bits: {', '.join(kinds)}"] if kinds else []
    others += _stacked(model) + _convolutions(model, recipe) + _transposed(model)
    _check_patterns(linears, skip)
    family = find_family(model)
    tied = tied_names(model)
    targets = {n: _target(n, m, recipe, family, skip, tied.get(f"{n}.weight", "")) for n, m in linears.items()}
    if not any(t for t, _ in targets.values()):
        raise DQError(f"nothing to quantize in {name}: " + "; ".join([*_why_none(targets, recipe), *others]))
    rows = _rows(linears, targets, family)
    other = model_bytes(model) - sum(2 * m.weight.numel() for m in linears.values())
    others += _choices(rows, recipe) + _cut_down(rows)
    return Plan(name, recipe, family, rows, other, (*others, *idle_rules(recipe, linears, tied)))


def _cut_down(rows: Sequence[PlanRow]) -> list[str]:
    """Remarks about what transforms cannot give as it was asked for, with the first layer of each kind."""
    sized = [(row, m, shape) for row in rows if row.target for m, shape in zip(row.members, row.shapes, strict=True)]
    found = [(p.remark, m) for row, m, shape in sized for p in _planned(shape, row) if p.remark]
    return [f"{name}: {remark}" for remark, name in dict(reversed(found)).items()]


def _convolutions(model: nn.Module, recipe: Recipe) -> list[str]:
    """A remark about convolutions that no recipe reaches."""
    kinds = (nn.Conv1d, nn.Conv3d) if recipe.conv else (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    found = [m.weight.numel() * 2 for m in model.modules() if isinstance(m, kinds)]
    why = "only 2-D ones are quantized" if recipe.conv else "the recipe has no [conv] section"
    return [f"{len(found)} convolutions stay in 16 bits ({size_text(sum(found))}): {why}"] if found else []


def _transposed(model: nn.Module) -> list[str]:
    """A remark about transformers' Conv1D, GPT-2's linear, which is no nn.Linear."""
    found = sum(type(m).__name__ == "Conv1D" and not isinstance(m, nn.Linear) for m in model.modules())
    return [f"{found} Conv1D of transformers stay in 16 bits: only nn.Linear is quantized"] if found else []


def _stacked(model: nn.Module) -> list[str]:
    """A remark about experts in one tensor [experts, N, K] that nothing could turn into linears: they stay."""
    found: dict[str, list[tuple[str, int]]] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if "expert" in f"{name} {kind}".lower():
            own = [(f"{name}.{n}", 2 * p.numel()) for n, p in module.named_parameters(recurse=False) if p.dim() == 3]
            found.setdefault(kind, []).extend(own)
    return [
        f"{len(held)} stacked expert weights (e.g. {held[0][0]}) are no linears, and {kind} is no layer that dq opens: "
        f"{size_text(sum(size for _, size in held))} stay in 16 bits"
        for kind, held in found.items()
        if held
    ]


def _choices(rows: Sequence[PlanRow], recipe: Recipe) -> list[str]:
    """A remark about what an `auto` recipe chooses from.

    Raises:
        DQError: its budget is below the smallest candidates.
    """
    auto, free = recipe.auto, [r for r in rows if r.target == recipe.linear]
    if auto is None or not free:
        return []
    elements = sum(r.elements for r in free)
    least = 8 * sum(min(_bytes_of(r, c.target) for c in auto.candidates) for r in free) / elements
    budget = (auto.bits or 8 * sum(r.nbytes for r in free) / elements) + auto.extra_bits
    if budget < least < math.inf:  # where no candidate fits a group at all, scoring says why
        raise DQError(f"the smallest candidates take {least:.3f} bits per weight, the budget of [auto] is {budget:.3f}")
    names = ", ".join(c.name for c in auto.candidates)
    return [f"auto: {len(free)} groups choose from {names} within {budget:.2f} bits per weight; shown is the first"]


def _bytes_of(row: PlanRow, target: Target) -> float:
    try:
        return replace(row, target=target).nbytes
    except DQError:  # a candidate that does not fit this group
        return math.inf


def _why_none(targets: dict[str, tuple[Target | None, str]], recipe: Recipe) -> list[str]:
    """Why every linear of a model stays in 16 bits, and what helps."""
    why = Counter(reason for _, reason in targets.values()).most_common(3)
    out = [f"of {len(targets)} linears, {c} stay 16-bit ({reason})" for reason, c in why] or ["it holds no nn.Linear"]
    if any(reason.startswith("too small") for reason, _ in why):
        out.append("for tiny models lower the bound: recipe.with_(min_features=16), --min-features 16")
    return out


def _check_patterns(linears: dict[str, nn.Linear], skip: Sequence[str]) -> None:
    if isinstance(skip, str):
        raise DQError(f"skip takes a list of patterns, got the string {skip!r}")
    for pattern in typed(skip, (list, tuple, set, frozenset), "skip takes a list of patterns"):
        if not any(matches(n, typed(pattern, str, "a skip pattern is text")) for n in linears):
            leaves = {part for n in linears for part in (n, n.rpartition(".")[2], *n.split("."))}
            raise DQError(f"skip pattern {pattern!r} matches no linear{suggest(pattern, leaves)}")


def tied_names(model: nn.Module) -> dict[str, str]:
    """parameter -> another name of the same parameter; quantizing under one name would untie the other."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {n: next(o for o in group if o != n) for group in names.values() if len(group) > 1 for n in group}


def _target(name: str, module: nn.Linear, recipe: Recipe, family: Family, skip, tied) -> tuple[Target | None, str]:
    """The target of one linear, or None and the reason why it stays in 16 bits."""
    target, reason = _wanted(name, module, recipe, family, skip, tied)
    n, k = size(module)
    if target is not None and not n * k:
        return None, "empty"
    for spec in filter(None, (target.weights, target.activations) if target else ()):
        # A last, shorter group is padded; rows of less than half a group (and not of tiny models) are a mistake.
        if (spec.columns or 0) > max(2 * k, 256):
            return None, f"groups of {spec} are longer than its K = {k}"
    return target, reason


def _wanted(name: str, module: nn.Linear, recipe: Recipe, family: Family, skip, tied) -> tuple[Target | None, str]:
    """What the caller, the recipe and the family say about one linear, in this order."""
    if any(matches(name, p) for p in skip):
        return None, "skipped by the caller"
    if tied:
        return None, f"tied to {tied.removesuffix('.weight')}"
    rule = next((r for r in recipe.rules if matches(name, r.match)), None)
    if rule is not None:
        return rule.target, rule.reason if rule.target is None else ""
    target = recipe.conv if isinstance(module, nn.Conv2d) else recipe.linear
    why = family.keep_reason(name, target.weights.fmt.bits)
    n, k = size(module)
    if why:
        return None, why
    if isinstance(module, nn.Conv2d) and module.groups > 1:
        return None, f"a convolution of {module.groups} groups"
    bound = family.min_features if recipe.min_features is None else recipe.min_features
    if min(n, k) < bound or k % recipe.multiple:
        return None, f"too small to quantize ({n}x{k}, bound {bound})"
    if family.is_modulation(name):
        return recipe.modulation, "" if recipe.modulation else "modulation"
    return target, ""


def _rows(linears: dict[str, nn.Linear], targets: dict[str, tuple[Target | None, str]], family: Family):
    """Linears with one target gathered into groups: shared inputs first, then shared smoothing across inputs."""
    rows, done = [], set()
    for name in linears:
        if name in done:
            continue
        target, reason = targets[name]
        inputs = [_present(name, family.inputs, family, linears, targets)]
        if target is not None and any(n == "smooth" for n, _ in target.transforms):
            for partner in _present(name, family.smooth, family, linears, targets):
                if partner not in inputs[0]:
                    inputs.append(_present(partner, family.inputs, family, linears, targets))
        if target is None:
            inputs = [(name,)]
        members = tuple(m for i in inputs for m in i)
        done.update(members)
        rows.append(_row(members, tuple(inputs), linears, target, reason, family))
    return tuple(rows)


def _present(name: str, groups, family: Family, linears, targets) -> tuple[str, ...]:
    """Partners of `name` that exist, have the same K and the same target."""
    width, target = size(linears[name])[1], targets[name][0]
    found = [
        p
        for p in family.partners(groups, name)
        if p in linears and size(linears[p])[1] == width and targets[p][0] == target
    ]
    return tuple(found) or (name,)


def _row(members, inputs, linears, target, reason, family: Family) -> PlanRow:
    shapes = tuple(size(linears[m]) for m in members)
    lowrank = []
    for m in members:
        together = tuple(p for p in family.partners(family.lowrank, m) if p in members) or (m,)
        if together not in lowrank:
            lowrank.append(together)
    parts = _parts(members[0], linears, family)
    row = PlanRow(members, shapes, family.block_of(members[0]), inputs, tuple(lowrank), parts, target, reason)
    if target is not None:
        planned_config(shapes[0], row)  # refuses now what could not be fitted later
    return row


def _parts(name: str, linears: dict[str, nn.Module], family: Family) -> tuple[int, ...]:
    """Widths of the parts of a concatenated input, () unless they are known and fill K; "..." is what is left of it."""
    (_, k), listed = size(linears[name]), family.parts_of(name)
    area = math.prod(getattr(linears[name], "kernel_size", ()))  # a convolution reads each channel once per tap
    found = [size(linears[p])[0] * area for p in listed if p in linears]
    if listed[-1:] == ("...",) and len(found) == len(listed) - 1:
        found.append(k - sum(found))
    return tuple(found) if found and min(found) > 0 and sum(found) == k else ()
