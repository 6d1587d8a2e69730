"""What works with what: one row per family and recipe, one column per thing that users do with a quantized model.

`python tests/support/matrix.py` runs all of it on tiny models (ten minutes) and writes docs/matrix.md; with names of
families it runs those and replaces their rows. A cell is "ok" or the reason why not. tests/pipelines/test_matrix.py
checks that the file has every row, and runs some of them again.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny_models import CASES, Case
from torch import nn

import dq
from dq.family import FAMILIES, find_family
from dq.linear import quantized_linears
from dq.records import tensors

PAGE = Path(__file__).parents[2] / "docs" / "matrix.md"
RECIPES = ("fp8", "int8-smooth", "w4a4-int4-convrot", "w4a4-nvfp4-svd")
BOUNDS = {"fp8": 0.2, "int8-smooth": 0.2, "w4a4-int4-convrot": 0.9, "w4a4-nvfp4-svd": 0.6}  # relative output error
# Model families of diffusers, each by one tiny model; the last row stands for everything that is detected.
ROWS = {f.name: f.classes[0] for f in FAMILIES if f.classes[0] in CASES}
ROWS |= {"unet (sdxl)": "UNet2DConditionModel@sdxl", "detected": "AuraFlowTransformer2DModel"}


class No(Exception):
    """Why something does not apply."""


def quantized(case: Case, recipe: str) -> nn.Module:
    model, plan = case.build(), dq.Recipe.load(recipe).with_(min_features=16)
    records = [case.inputs(seed=s) for s in range(2)] if plan.needs_calibration else None
    dq.quantize(model, plan, calibration=records, progress=False)
    return model


def run(model: nn.Module, case: Case) -> torch.Tensor:
    with torch.no_grad():
        return tensors(model(**case.inputs(seed=5)))[0]


def _error(value: torch.Tensor, reference: torch.Tensor) -> float:
    return float((value - reference).norm() / reference.norm())


def check_run(model: nn.Module, case: Case, recipe: str) -> None:
    error = _error(run(model, case), run(case.build(), case))
    assert 0 < error < BOUNDS[recipe], f"relative error {error:.2g}"


def check_save(model: nn.Module, case: Case, recipe: str) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = type(model).from_pretrained(folder).eval()
    assert torch.equal(run(loaded, case), run(model, case)), "other bits"


def check_lora(model: nn.Module, case: Case, recipe: str) -> None:
    """An adapter on every quantized linear: it acts; off is the model before; on again is what it was."""
    from peft import LoraConfig

    if not hasattr(model, "add_adapter"):
        raise No("diffusers gives the class no adapters")
    before, targets = run(model, case), sorted(quantized_linears(model))
    model.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=targets, init_lora_weights=False))
    on = run(model, case)
    model.disable_adapters()
    off = run(model, case)
    model.enable_adapters()
    assert _error(on, before) > 1e-3, "no effect"
    assert torch.equal(off, before), "off is not what it was"
    assert torch.equal(run(model, case), on), "on again is not what it was"


def check_offload(model: nn.Module, case: Case, recipe: str) -> None:
    """As sequential offload does it (weights wait elsewhere and come per module), and group offload; on the CPU."""
    from accelerate import cpu_offload

    before, other = run(model, case), copy.deepcopy(model)
    cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
    assert torch.equal(run(model, case), before), "sequential offload gives other bits"
    if getattr(other, "_supports_group_offloading", False):
        where = torch.device("cpu")
        other.enable_group_offload(onload_device=where, offload_device=where, offload_type="leaf_level")
        assert torch.equal(run(other, case), before), "group offload gives other bits"


def check_compile(model: nn.Module, case: Case, recipe: str) -> None:
    """Every repeated block as one graph, without breaks."""
    torch._dynamo.reset()
    before, family = run(model, case), find_family(model)
    blocks = [m for n, m in model.named_modules() if n and family.block_of(n) == n]
    for block in blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    after = run(model, case)
    torch._dynamo.reset()
    assert blocks and _error(after, before) < 1e-2, "other results"


COLUMNS: dict[str, Callable[[nn.Module, Case, str], None]] = {
    "quantize, run": check_run,
    "save, load": check_save,
    "LoRA": check_lora,
    "offload": check_offload,
    "compile": check_compile,
}


def cell(column: str, model: nn.Module, case: Case, recipe: str) -> str:
    """ "ok", or the reason why not in a few words."""
    try:
        COLUMNS[column](copy.deepcopy(model), case, recipe)
    except No as reason:
        return str(reason)
    except Exception as error:
        words = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {words[0][:100]}".replace("|", "/")
    return "ok"


def row(family: str, recipe: str) -> dict[str, str]:
    """Column -> cell."""
    torch.manual_seed(0)
    case = CASES[ROWS[family]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = quantized(case, recipe)
        return {column: cell(column, model, case, recipe) for column in COLUMNS}


HEAD = """# What works with what

Written by `python tests/support/matrix.py` from what it ran: a tiny random model per family, on a CPU. A cell is "ok"
or the reason why not. "save, load" asks for the same bits; "LoRA" for an adapter on every quantized linear that acts,
comes off without a trace and goes on again; "offload" for the same bits under sequential and group offload; "compile"
for every block as one graph (`fullgraph=True`, backend `aot_eager`). What a GPU adds to these is not tested here.

"""


def page(cells: dict[tuple[str, str], dict[str, Any]]) -> str:
    """The whole text of docs/matrix.md."""
    lines = [f"| family | tiny model | recipe | {' | '.join(COLUMNS)} |", "|---" * (3 + len(COLUMNS)) + "|"]
    for (family, recipe), found in cells.items():
        lines.append(f"| {family} | `{ROWS[family]}` | `{recipe}` | {' | '.join(found[c] for c in COLUMNS)} |")
    return HEAD + "\n".join(lines) + "\n"


def read(text: str) -> dict[tuple[str, str], dict[str, str]]:
    """What `page` was made of."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    return {(r[0], r[2].strip("`")): dict(zip(COLUMNS, r[3:], strict=True)) for r in rows[1:]}


def main(families: list[str], out: Path = PAGE) -> None:
    """Runs all families, or those named, and writes their rows."""
    cells = read(out.read_text(encoding="utf-8")) if families and out.exists() else {}
    for family in families or ROWS:
        for recipe in RECIPES:
            cells[family, recipe] = row(family, recipe)
            print(family, recipe, cells[family, recipe], flush=True)
    order = {key: cells[key] for key in ((f, r) for f in ROWS for r in RECIPES) if key in cells}
    out.write_text(page(order), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
