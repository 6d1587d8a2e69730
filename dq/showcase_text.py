"""`dq bench llm`: one language model quantized by every recipe, cache and library of a table, scored on one text."""

from __future__ import annotations

import copy
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dq import checks
from dq.eval import environment
from dq.eval.bench import llm, llm_methods, llm_peers, llm_rows
from dq.eval.perplexity import TextScorer, bits
from dq.linear import layer_info
from dq.pipelines.api import quantize
from dq.pipelines.kv_cache import KVCache, cache_argument
from dq.pipelines.loading import load, load_tokenizer, parse_dtype, quiet_libraries
from dq.pipelines.text import Text, read_text
from dq.recipe import Recipe
from dq.registry import DQError

REFERENCE = "16-bit"
BATCH = 8  # windows in one call on a GPU, which one window of a small model leaves idle


@dataclass(frozen=True)
class Settings:
    """Of a table; all rows share them.

    Attributes:
        source: folder, GGUF file or hub id of the model.
        text, calibration: files: what scores, and what calibrates.
        windows, length, stride: of the text that scores; see `evaluate_text`.
        samples: windows that calibrate.
        off_lattice: judge the copy that `llm.scramble` makes.
        min_features: a linear with a smaller side stays in 16 bits, and is not counted; None is the family's own bound.
        sequential: as `dq.quantize` takes it.
        kernels: recipes run in BF16 by the kernels that this machine chooses, on the grids that these have; the 16-bit
            model, calibration, caches and other libraries stay as they are.
    """

    source: str
    text: str
    calibration: str | None = None
    windows: int = 33
    length: int = 512
    stride: int | None = None
    samples: int = 32
    seed: int = 0
    off_lattice: bool = False
    dtype: str = "fp32"
    device: str | None = None
    min_features: int | None = None
    sequential: bool | str = False
    kernels: bool = False

    def keys(self, recipes: Mapping[str, Recipe | None], device: torch.device) -> dict[str, str]:
        """Of every row and of the 16-bit model: what its scores depend on, as `llm_rows.key`; where files lie, the
        name of a recipe and the number of processes do not count."""
        shared = {k: v for k, v in asdict(self).items() if k != "device"}
        shared |= {k: llm_rows.fingerprint(shared[k]) for k in ("source", "text", "calibration")}
        where = environment.describe(device)
        shared["versions"] = {k: where["versions"].get(k) for k in ("dq", "torch", "transformers", "triton")}
        shared["device"] = where["device"] if device.type == "cuda" else "cpu"  # however many threads
        out = {REFERENCE: llm_rows.key(shared, REFERENCE)}
        for name, recipe in recipes.items():
            what = llm_methods.CACHES.get(name, name)
            if recipe is not None:
                what = recipe.to_dict() | {"name": "", "description": ""}
            out[name] = llm_rows.key(shared, what, llm_peers.PEERS[name][0] if name in llm_peers.PEERS else None)
        return out

    def recipes(self, names: Sequence[str]) -> dict[str, Recipe | None]:
        """Of every row.

        Raises:
            DQError: an unknown name, one that stands twice, or no text for those that calibrate, before anything runs.
        """
        llm_methods.check_names(names)
        found = {n: llm_methods.recipe(n) for n in names}
        if self.min_features is not None:
            found = {n: r and r.with_(min_features=self.min_features) for n, r in found.items()}
        calibrated = any(r is not None and r.needs_calibration for r in found.values())
        if (calibrated or set(names) & set(llm_peers.PEERS)) and self.calibration is None:
            raise DQError("recipes that calibrate need --calibration FILE, another text than the one that scores")
        if self.calibration is not None and Path(self.calibration).resolve() == Path(self.text).resolve():
            raise DQError("--calibration is the text that scores: give another one, or the numbers flatter the recipes")
        checks.device(self.device)
        parse_dtype(self.dtype)
        return found

    def title(self) -> str:
        name = f"{Path(self.source).name}{', off the lattice' * self.off_lattice}, {self.dtype}"
        return f"{name}, {Path(self.text).name}"


class Table:
    """The model, the text and the 16-bit scores: what all rows need, loaded once."""

    def __init__(self, settings: Settings):
        self.settings = settings
        quiet_libraries()
        words, tokenizer = read_text(settings.text), load_tokenizer(settings.source)
        self.model = load(settings.source, parse_dtype(settings.dtype), settings.device)
        if settings.off_lattice:
            llm.scramble(self.model, settings.seed)
        self.model.requires_grad_(False).eval()
        self.text = None
        if settings.calibration is not None:
            self.text = Text.from_file(
                settings.calibration, tokenizer, samples=settings.samples, length=settings.length, seed=settings.seed
            )
        batch = BATCH if next(self.model.parameters()).is_cuda else 1
        self.scorer = TextScorer(
            self.model, words, tokenizer, length=settings.length, stride=settings.stride, limit=settings.windows,
            batch=batch,
        )  # fmt: skip
        self.reference = self.scorer.reference_scores()

    def fresh(self) -> nn.Module:
        return copy.deepcopy(self.model)

    def base(self) -> dict[str, Any]:
        """The row of the 16-bit model."""
        size = 2 * llm_peers.elements(self.model)
        return llm.row(REFERENCE, self.reference, bits=16.0, mb=size / 1e6)

    def row(self, name: str, recipe: Recipe | None, limit: float | None = None) -> dict[str, Any]:
        """Any other row; of one that cannot run or takes longer than `limit` seconds, the reason."""
        try:
            with llm_rows.limited(limit):
                if recipe is not None:
                    return self._own(name, recipe)
                return self._cache(name) if name in llm_methods.CACHES else self._peer(name)
        except llm_rows.OverTime:
            return llm.row(name, {}, failed=f"took more than {limit:g} s (--row-limit)")
        except Exception as error:  # another library may raise anything; the other rows go on
            kind = "" if isinstance(error, DQError) else f"{type(error).__name__}: "
            return llm.row(name, {}, failed=kind + checks.line(error, 100))

    def _own(self, name: str, recipe: Recipe) -> dict[str, Any]:
        model, s = self.fresh(), self.settings
        report = quantize(
            model,
            recipe,
            calibration=self.text if recipe.needs_calibration else None,
            sequential=s.sequential if recipe.needs_calibration else False,
            activations="auto" if s.kernels else "faithful",  # the recipe's own grid, of every figure of accuracy
            progress=False,
        )
        scores = self.scorer.score(model.to(torch.bfloat16) if s.kernels else model, name)
        layers = layer_info(model)
        ran = {f"{x.backend} {x.grid}" for x in layers}
        costs = dict(bits=bits(model), mb=sum(x.nbytes for x in layers) / 1e6, seconds=report.seconds)
        return llm.row(name, scores, **costs, ran=sorted(ran))

    def _cache(self, name: str) -> dict[str, Any]:
        make = partial(KVCache, llm_methods.CACHES[name], self.model.config, exact=False)
        model = llm.Cached(self.model, make, cache_argument(self.model))
        scores = self.scorer.score(model, name)
        bits_, size = llm.cache_cost(model.last, model.sequences)
        return llm.row(name, scores, bits=bits_, mb=size / 1e6)

    def _peer(self, name: str) -> dict[str, Any]:
        model, device, start = self.fresh(), next(self.model.parameters()).device, time.perf_counter()
        weights = llm_peers.elements(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            size = llm_peers.quantize(name, model, [ids[None].to(device) for ids in self.text.ids])
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - start
            scores = self.scorer.score(model, name)
        return llm.row(name, scores, bits=8 * size / weights, mb=size / 1e6, seconds=seconds)


_TABLE: Table | None = None  # of a worker process


def _begin(settings: Settings) -> None:
    global _TABLE
    torch.set_num_threads(1)
    _TABLE = Table(settings)


def _row(item: tuple[str, Recipe | None], limit: float | None) -> dict[str, Any]:
    return _TABLE.row(*item, limit)


def bench_llm(
    settings: Settings,
    names: Sequence[str] | None = None,
    *,
    workers: int = 1,
    say: Callable[[dict[str, Any]], None] = lambda row: None,
    note: Callable[[str], None] = lambda line: None,
    out: str | None = None,
    resume: bool = False,
    limit: float | None = None,
) -> dict[str, Any]:
    """The table as a JSON-clean dict: title, rows, ratios of `llm_methods.PAIRS`, settings, environment.

    Args:
        names: rows, presets or TOML files; None for all rows.
        workers: processes that work on rows beside each other; more than one make every row's seconds longer.
        say: is given every row as soon as it is there.
        note: is given what else there is to say.
        out: a file that holds all rows so far, written anew after each: an interruption loses only those at work.
        resume: take over the rows of that file whose key is the same (`Settings.keys`); others are measured.
        limit: seconds that one row may take; of one that takes longer the table says so.

    Raises:
        DQError: as `Settings.recipes`; a model or text that does not load; resuming without a file or from another.
    """
    recipes = settings.recipes(llm_methods.names() if names is None else names)
    if resume and out is None:
        raise DQError("--resume continues the file of --json FILE: name it")
    if limit is not None and not limit > 0:
        raise DQError("--row-limit is in seconds, above 0")
    device = checks.device(settings.device)
    keys = settings.keys(recipes, device)
    rows, changed = llm_rows.kept(out, keys) if resume else ([], [])
    if changed:
        note(f"measured under other settings, so measured anew: {', '.join(changed)}")
    have = {r["recipe"] for r in rows}
    if have:
        note(f"{len(have)} of {len(keys)} rows are there already")
    todo = {n: recipes[n] for n in llm_rows.first(list(recipes), llm_methods.FIRST) if n not in have}
    with _begun(settings, todo, workers) as (table, pool):
        found = {
            "title": "",
            "rows": rows,
            "ratios": llm.ratios(rows, llm_methods.PAIRS),
            "settings": asdict(settings) | table.scorer.settings(),
        }
        found["settings"] |= {"workers": workers, "row_limit": limit}
        found["environment"] = environment.describe(device)
        found["title"] = f"{settings.title()}: {found['settings']['scored_tokens']} tokens"
        place = {name: i for i, name in enumerate(dict.fromkeys([*keys, *have]))}
        for row in _rows(table, pool, todo, limit, base=REFERENCE not in have):
            rows.append(row | {"key": keys[row["recipe"]]})
            rows.sort(key=lambda r: place[r["recipe"]])
            found["ratios"] = llm.ratios(rows, llm_methods.PAIRS)
            say(row)
            if out is not None:
                llm_rows.write(out, found)
    return found


@contextmanager
def _begun(settings: Settings, todo: Mapping[str, Any], workers: int) -> Iterator[tuple[Table, Any]]:
    """What all rows need, and processes for them (or None) that load the same beside this one."""
    if workers == 1 or not todo:
        yield Table(settings), None
        return
    context = multiprocessing.get_context("spawn")  # CUDA allows no other
    with context.Pool(min(workers, len(todo)), _begin, (settings,)) as pool:
        yield Table(settings), pool


def _rows(
    table: Table, pool: Any, todo: Mapping[str, Recipe | None], limit: float | None, base: bool
) -> Iterator[dict[str, Any]]:
    """The 16-bit model's if asked for, then the others as they are ready."""
    if base:
        yield table.base()
    if pool is None:
        yield from (table.row(*item, limit) for item in todo.items())
    else:
        yield from pool.imap_unordered(partial(_row, limit=limit), todo.items(), chunksize=1)
