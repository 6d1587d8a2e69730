"""The one loop over blocks: records -> Stats -> transforms -> rounding -> QTensor -> QuantizedLinear in place."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from dq.auto import ChoiceTable, choose, decided, reference_score, restored_gains, score_row, undecided
from dq.checkpoint import artifact_meta
from dq.collect import Collector, in_sample, thin
from dq.conv import like, plain
from dq.group import check_weights, quantize_row
from dq.linear import LayerInfo, QuantizedLinear, layer_info, quantized_linears
from dq.planning import Plan, PlanRow, model_bytes, subset
from dq.reconstruct import captured, learn_block
from dq.records import Record, outputs, relative_error
from dq.registry import DQError
from dq.replay import Replay, call, call_order, device_of
from dq.resume import ResumeFolder
from dq.sequential import count, stages
from dq.stats import Stat
from dq.steps import watch

RESIDENT = 2**30  # bytes of a 16-bit model's outputs that may stay on its device
LOST_DB = 3.0  # a layer whose error is half as strong as its signal


@dataclass
class QuantizeReport:
    """What `quantize` did.

    Attributes:
        recipe: its name.
        seconds: wall time; of `dq.quantize`, calibration included.
        layers: one row per quantized linear, with its SQNR.
        bytes_before, bytes_after: of all parameters and buffers, the former in 16 bits.
        plan: what was planned (after groups were verified).
        calibration: what was used, JSON-clean; {} for data-free.
        choices: of an `auto` recipe: what every group took, and by how much (printable), else None.
    """

    recipe: str
    seconds: float
    layers: list[LayerInfo]
    bytes_before: int
    bytes_after: int
    plan: Plan
    calibration: dict[str, Any] = field(default_factory=dict)
    choices: ChoiceTable | None = None

    def __str__(self) -> str:
        worst = sorted((x for x in self.layers if x.sqnr_db is not None), key=lambda x: x.sqnr_db)[:3]
        lowest = ", ".join(f"{x.name} {x.sqnr_db:.1f} dB" for x in worst) or "none measured"
        return (
            f"{self.recipe}: {len(self.layers)} linears in {self.seconds:.1f} s, {self.bytes_before / 1e6:.1f} MB -> "
            f"{self.bytes_after / 1e6:.1f} MB; lowest SQNR: {lowest}"
        ) + "".join(f"\n  note: {r}" for r in self.plan.remarks if r.startswith("SQNR"))


def quantize_model(
    model: nn.Module,
    plan: Plan,
    records: Sequence[Record] = (),
    *,
    device: torch.device | str | None = None,
    resume: str | None = None,
    prefix: str = "fp",
    calibration: dict[str, Any] | None = None,
    progress: Callable[..., Any] = tqdm,
) -> QuantizeReport:
    """Quantizes `model` in place as planned: all of it, or, when anything goes wrong on the way, nothing.

    Args:
        records: calibration calls of the model; may be empty for data-free recipes.
        device: where the arithmetic of transforms and rounding runs; default: where each weight is.
        resume: folder in which finished blocks are kept; a second call with the same folder continues there.
        prefix: `fp`: block inputs come from the 16-bit model; `quantized`: from the already quantized prefix;
            `linears`: those of every linear too, see dq.sequential.
        calibration: JSON-clean description of the records, kept in the artifact.

    Raises:
        DQError: the recipe needs calibration and there is none, NaN/Inf in a weight or input (names the layer), or a
            resume folder that belongs to other work.
    """
    if plan.recipe.needs_calibration and not len(records):
        raise DQError(
            f"recipe {plan.recipe.name!r} needs calibration and got no records; pass calibration=dq.Prompts([...]), of "
            "a language model dq.Text([...], tokenizer), or take a data-free recipe (dq list recipes)"
        )
    if prefix not in ("fp", "quantized", "linears"):
        raise DQError(f"prefix must be 'fp', 'quantized' or 'linears', got {prefix!r}")
    start, before = time.perf_counter(), model_bytes(model)
    check_weights(model, plan)
    loop = _Loop(model, plan, list(records), device, prefix, calibration or {}, resume)
    with torch.no_grad(), progress(total=loop.steps, desc=plan.recipe.name, unit="step") as bar:
        choices = loop.choose(bar.update) if plan.recipe.auto else None
        loop.run_all(bar.update)
    watch(model)
    model.dq_artifact = artifact_meta(model, plan, calibration or {})
    for remark in (found := in_sample(loop.thin)):
        warnings.warn(remark, stacklevel=2)
    remarks = (*loop.remarks, *found)
    seconds, plan = time.perf_counter() - start, replace(plan, rows=tuple(loop.rows), remarks=remarks)
    layers = layer_info(model)
    warn_of_losses(layers)
    after = model_bytes(model)
    return QuantizeReport(plan.recipe.name, seconds, layers, before, after, plan, calibration or {}, choices)


def warn_of_losses(layers: Sequence[LayerInfo]) -> None:
    """Warns about linears of which quantization left almost nothing."""
    lost = [f"{x.name} ({x.weights})" for x in layers if x.sqnr_db is not None and x.sqnr_db < LOST_DB]
    if lost:
        what = (
            f"almost nothing is left of {len(lost)} linears (SQNR below {LOST_DB} dB), e.g. {lost[0]}: values too small"
        )
        warnings.warn(what + " for its scales, or outliers; skip it or take another grid", stacklevel=3)


class _Loop:
    """State of one quantization: which rows belong to which block, and the replay that feeds them."""

    def __init__(self, model, plan: Plan, records, device, prefix, calibration, resume):
        self.model, self.plan, self.records, self.device, self.prefix = model, plan, records, device, prefix
        self.rows, self.remarks = list(plan.rows), list(plan.remarks)
        self.calibration, self.auto = calibration or {}, plan.recipe.auto
        self.folder = ResumeFolder(resume, model, plan, calibration | {"prefix": prefix}) if resume else None
        blocks = [b for b in plan.blocks() if b]
        order = call_order(model, self._all_blocks(), records[0]) if records and blocks else []
        if records and blocks and not order:
            self.remarks.append("blocks are not called exactly once each: calibrated over the whole model at once")
        self.replay = Replay(model, order, records, plan.family.keep_outputs)
        self.collector = Collector(model, records, any(r.target.step_groups for r in plan.quantized))
        self.learn, self.thin = plan.recipe.reconstruct, {}  # first linear -> distinct inputs of rows with few of them
        # Without an order (or without records) the whole model is one unit, still quantized block by block.
        self.schedule = (order or blocks) + ([""] if any(r.block == "" for r in plan.quantized) else [])
        self.observe = bool(records) and (not order or "" in self.schedule)
        self.whole: dict[str, Stat] = {}
        # Finished layers wait on the CPU and are swapped in at the very end.
        self.done: dict[str, QuantizedLinear] = {}

    @property
    def steps(self) -> int:
        """Rows to quantize plus model or block runs of calibration: the units of the progress bar."""
        return len(self.plan.quantized) + self._runs + (self._survey_steps if self.auto else 0)

    @property
    def _runs(self) -> int:
        return len(self.records) * (sum(map(self._passes, self.replay.order)) + self.observe)

    def _passes(self, block: str) -> int:
        """Runs of a block that gather statistics."""
        return count([r for r in self.plan.quantized if r.block == block]) if self.prefix == "linears" else 1

    @property
    def _survey_steps(self) -> int:
        """The same for `choose`."""
        passes = len(self.records) * (len(self.replay.order) + self.observe)
        return len(undecided(self.plan)) * (1 + self.auto.rounds * len(self._scored())) + passes

    def _scored(self) -> list[int]:
        """Records on which the model's output is compared: of those held out, of all where there are few."""
        held = list(range(3, len(self.records), 4)) or list(range(len(self.records)))
        return held[:: max(1, len(held) // self.auto.records)][: self.auto.records]

    def run_all(self, tick: Callable[[int], Any]) -> None:
        """Runs every block, then puts the finished layers into the model."""
        self.tick = tick
        if self.observe:
            outside = [r for r in self.plan.quantized if not self.replay.order or r.block == ""]
            self.whole = self._collect(outside, self._call)
        for block in self.schedule:
            self.run(block)
        while self.done:
            self._swap(dict([self.done.popitem()]))

    def choose(self, tick: Callable[[int], Any]) -> ChoiceTable:
        """Lets the rows of an `auto` recipe take their targets: candidates scored block by block, groups weighed on the
        model's output, bytes spent by `auto.choose`. A resume folder remembers the outcome."""
        self.tick = tick
        free = undecided(self.plan)
        known = self.folder.load_choices() if self.folder else None
        if known is not None:
            table, split = ChoiceTable.from_list(known[0]), known[1]
            self.collector.split |= split
            pieces = {p.members: p for row in free for p in self._verified(row)}
            tick(self._survey_steps)
            self._decide(decided([pieces[c.members] for c in table], table, self.auto))
            return table
        self.collector.survey = True
        found: dict[tuple[str, ...], tuple] = {}
        if self.observe:
            outside = [r for r in free if not self.replay.order or r.block == ""]
            self.whole = self._collect(outside, self._call)
        for block in self.schedule:
            rows, stats = [r for r in free if r.block == block], self.whole
            if self.replay.order and block:
                stats = self._collect(rows, lambda i, b=block: self._step(b, i))
            for part in [p for row in rows for p in self._verified(row)]:
                found[part.members] = score_row(self.model, part, stats, self.auto, self.device)
                self.tick(1)
        self.replay, self.whole, self.collector.survey = self.replay.fresh(), {}, False
        return self._allocate([r for r in self.rows if r.members in found], found, self._scored())

    def _allocate(self, rows: list[PlanRow], found: dict[tuple[str, ...], tuple], held: list[int]) -> ChoiceTable:
        """Spends the bytes, by how much the model's output gains from each group when all are quantized."""
        rows = sorted(rows, key=lambda r: self.schedule.index(r.block))  # as they are called
        scores = [found[r.members][0] for r in rows]
        current = [reference_score(s).candidate for s in scores]
        replay, device = self.replay.fresh(), device_of(self.model)
        first = outputs(self._call(held[0]), device)[0]
        place = device if first.nbytes * len(held) <= RESIDENT else "cpu"
        clean = {i: outputs(self._call(i), place)[0] for i in held}

        def wrong(group: int) -> Tensor:
            block = "" if group < 0 else rows[group].block
            replay.reach(block, held)
            return torch.tensor([relative_error(outputs(replay.rest(block, i), device)[0], clean[i]) for i in held])

        for _ in range(self.auto.rounds):
            layers = [found[r.members][1][name] for r, name in zip(rows, current, strict=True)]
            errors = [
                next(s.error for s in group if s.candidate == n) for group, n in zip(scores, current, strict=True)
            ]
            gains = restored_gains(layers, self._swap, wrong, lambda: self.tick(len(held)))
            weights = [gain / max(error, 1e-30) for gain, error in zip(gains, errors, strict=True)]
            taken, table = choose(rows, scores, weights, self.auto)
            current = [c.winner for c in table]
        if self.folder:
            self.folder.save_choices(table.to_list(), self.collector.split)
        self._decide(taken)
        return table

    def _decide(self, taken: list[PlanRow]) -> None:
        """Puts decided rows (or pieces of rows) in the place of the rows they came from."""
        first, new = {r.members[0]: r for r in taken}, []
        for row in self.rows:
            pieces = [first.pop(m) for m in row.members if m in first]
            new += pieces or [row]
        self.rows, self.plan = new, replace(self.plan, rows=tuple(new))

    def _all_blocks(self) -> list[str]:
        return [n for n, _ in self.model.named_modules() if n and self.plan.family.block_of(n) == n]

    def run(self, block: str) -> None:
        """Collects the block's statistics and quantizes its rows."""
        rows = [r for r in self.plan.quantized if r.block == block]
        done, notes = (self.folder.load(block) if self.folder else None) or (None, {})
        stats, held, parts = self.whole, None, [rows]
        replayed = self.replay.order and block and self.records
        if replayed:
            if self.prefix == "linears" and rows and done is None:
                parts = stages(self.model, rows, lambda: self._step(block, 0, False))
            # A quantized prefix hands on what the finished block gives, further down; keeping the 16-bit output too
            # would overwrite the very inputs that the second run replays.
            keep = self.prefix == "fp"
            count = self.learn.records if self.learn and done is None else 0
            with captured(self.model.get_submodule(block), count, len(self.records)) as held:
                stats = self._collect(() if done is not None else parts[0], lambda i: self._step(block, i, keep))
        if done is None:
            done, notes = self._quantize(parts, block, stats, held)
            if self.folder:
                self.folder.save(block, done, notes)
        else:
            self.collector.split |= notes["split"]
            for row in rows:
                self._verified(row)
                self.tick(1)
            self.tick(len(self.records) * (self._passes(block) - 1) if replayed else 0)
        self.thin |= notes["thin"]
        self.remarks += notes["remarks"]
        self.done |= {name: layer.to("cpu") for name, layer in done.items()}
        if replayed and self.prefix != "fp":
            originals = self._swap(done)
            for i in range(len(self.records)):
                self._step(block, i)
            self._swap(originals)

    def _quantize(
        self, parts: list[list[PlanRow]], block: str, stats: dict[str, Stat], held: Any
    ) -> tuple[dict[str, QuantizedLinear], dict[str, Any]]:
        """Finished layers of one block, and what the report says about them (JSON-clean). `stats` are of the first
        part; the others are calibrated behind those before them."""
        done, few, remarks = {}, {}, []
        for i, rows in enumerate(parts):
            stats = stats | self._behind(done, block, rows) if i else stats
            for row in rows:
                for part in self._verified(row):
                    done |= quantize_row(self.model, part, stats, self.device)
                    few |= thin(part, stats)
                self.tick(1)
        if held and done:
            inputs = [i for r in self.rows for i in r.inputs if i[0] in stats]
            samples = {m: stats[i[0]].held_rows[:128] for i in inputs for m in i}
            remarks.append(learn_block(self.model, block, done, held, self.learn.settings, samples))
        split = {m: first for m, first in self.collector.split.items() if m in done}
        return done, {"split": split, "thin": few, "remarks": remarks}

    def _behind(self, done: dict[str, QuantizedLinear], block: str, rows: list[PlanRow]) -> dict[str, Stat]:
        """Statistics of rows of a block, its finished layers in place."""
        originals = self._swap(done)
        try:
            return self._collect(rows, lambda i: self._step(block, i, False))
        finally:
            self._swap(originals)

    def _swap(self, layers: dict[str, nn.Module]) -> dict[str, nn.Module]:
        """Puts layers into the model, on the device and in the mode of those they replace; returns the latter."""
        replaced = {}
        for name, layer in layers.items():
            old = replaced[name] = self.model.get_submodule(name)
            self.model.set_submodule(name, like(layer, old).to(old.weight.device).train(old.training))
        return replaced

    def _call(self, index: int) -> Any:
        return call(self.model, self.records[index].args, self.records[index].kwargs, device_of(self.model))

    def _step(self, block: str, index: int, keep: bool = True) -> None:
        self.replay.advance(block, index, self.replay.inputs(block, index), keep)

    def _collect(self, rows: Sequence[PlanRow], forward: Callable[[int], Any]) -> dict[str, Stat]:
        """Runs all records with hooks on the rows' linears: one `Stat` per shared input, sharing checked on values."""
        grams = ((r, self.auto.needs_gram if self.collector.survey else r.target.needs_gram) for r in rows)
        return self.collector.run({i: gram for r, gram in grams for i in r.inputs}, forward, self.tick)

    def _verified(self, row: PlanRow) -> list[PlanRow]:
        """The row, or its pieces if calibration showed that inputs thought shared are not."""
        split = self.collector.split
        apart = [m for m in row.members if split.get(m) in row.members]  # once in pieces, it is whole
        if not apart:
            return [row]
        text = f"{', '.join(apart)} do not receive the same input as {split[apart[0]]}: treated apart"
        warnings.warn(text, stacklevel=2)
        self.remarks.append(text)
        kept = tuple(tuple(m for m in i if m not in apart) for i in row.inputs)
        pieces = [subset(row, kept)] + [subset(row, ((m,),)) for m in apart]
        at = self.rows.index(row)
        self.rows[at : at + 1] = pieces
        return pieces


def dequantize_model(model: nn.Module) -> nn.Module:
    """Puts 16-bit linears back: each holds the raw-basis weight that its quantized layer stood for.

    Raises:
        DQError: nothing in the model is quantized.
    """
    found = quantized_linears(model)
    if not found:
        raise DQError(f"{type(model).__name__} holds no quantized linear")
    for name, layer in found.items():
        new = plain(layer)
        new.weight = nn.Parameter(layer.dequantized_weight().reshape(new.weight.shape), requires_grad=False)
        if layer.bias is not None:
            constant = layer.constant()
            bias = layer.bias.detach() if constant is None else layer.bias.detach().to(torch.float32) + constant
            new.bias = nn.Parameter(bias.to(layer.compute_dtype), requires_grad=False)
        model.set_submodule(name, new.train(layer.training))
    if hasattr(model, "dq_artifact"):
        del model.dq_artifact
    return model
