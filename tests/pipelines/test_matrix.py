"""docs/matrix.md is what tests/support/matrix.py writes: every row is there, and some of them are run again."""

import re

import matrix
import pytest

CELLS = matrix.read(matrix.PAGE.read_text(encoding="utf-8"))


def test_the_page_has_every_row_and_nothing_else():
    assert matrix.PAGE.read_text(encoding="utf-8") == matrix.page(CELLS)
    assert list(CELLS) == [(family, recipe) for family in matrix.ROWS for recipe in matrix.RECIPES]
    assert len(matrix.ROWS) >= 18


def test_every_cell_is_ok_or_a_reason():
    """A reason is a sentence about the thing, never the name of an exception."""
    for key, found in CELLS.items():
        assert list(found) == list(matrix.COLUMNS)
        for column, cell in found.items():
            reason = len(cell.split()) >= 4 and not re.match(r"\w*(Error|Exception|Warning|No)\b", cell)
            assert cell == "ok" or reason, (*key, column, cell)


# Each recipe once, each time with another family.
@pytest.mark.parametrize(("family", "recipe"), zip(("dit", "wan", "sana", "chroma"), matrix.RECIPES, strict=True))
def test_rows_are_what_runs(family, recipe):
    assert matrix.row(family, recipe) == CELLS[family, recipe]


def test_a_failing_cell_says_so():
    """The generator does not paint anything green: a model that cannot be saved, or that another dtype breaks."""
    case = matrix.CASES[matrix.ROWS["dit"]]
    model = matrix.quantized(case, "fp8")
    model.save_pretrained = lambda *a, **k: (_ for _ in ()).throw(OSError("disk full"))
    assert matrix.cell("save, load", model, case, "fp8") == "OSError: disk full"
    assert matrix.cell("quantize, run", case.build(), case, "fp8").startswith("AssertionError: relative error 0")
