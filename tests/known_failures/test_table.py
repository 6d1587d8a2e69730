"""docs/known_failures.md: every failure that users met in tools of this kind, and the tests that hold it off."""

import ast
import os
import re

import pytest

# One line per case: what must not happen. Numbers are those of the public reports that the tests' docstrings tell of.
CASES = {
    1: "scales multiplied in after an FP16 product overflow it: black images",
    2: "activations beyond FP16's range turn into NaN without a word about where",
    3: "a tensor, row or block of zeros gives NaN",
    6: "a width that no group size divides ends in an assertion",
    8: "an odd number of codes cannot be packed",
    9: "token counts that fill no tile abort the process",
    11: "a batch of more than one sample is refused, or its samples influence each other",
    15: "inputs of one, four or five dimensions, or of no token, break a linear",
    17: "a class that nobody foresaw raises a KeyError",
    18: 'a "quantized" checkpoint is as large as the original',
    21: "the progress bar stands still for minutes, a cancelled run is lost",
    22: "calibration keeps all activations and runs out of memory",
    24: "a missing or empty calibration set crashes deep inside",
    26: "layers that were to be left alone were changed by the transforms of their neighbours",
    28: "pipeline calls that failed count as calibration samples",
    30: "embedders and modulation are quantized, and the image is lost",
    31: "a setting is dropped on the way and the 16-bit model runs, unnoticed",
    32: "misspelt components and skip patterns are accepted and match nothing",
    34: "a LoRA disappears in the rounding of a few bits",
    35: "fusing a LoRA reports success and leaves nothing of it",
    38: "a LoRA loads before quantization but not after",
    39: "adapters cannot attach to a model that was quantized by a function call",
    41: "foreign LoRA keys, missing or stray alphas are dropped without a word",
    47: "a quantized pipeline refuses to move, for a reason that is not one",
    48: "quantized blocks cannot be offloaded, or stay on the accelerator",
    51: "a quantized model cannot be copied",
    52: "a reloaded model lacks scales and gives something else, without an error",
    53: "quantized tensors cannot be written as safetensors",
    55: "tied embeddings come apart, or are not saved",
    58: "a layer without a bias gets a random one on loading",
    61: "a model is quantized twice, and fails late or never",
    62: "nibbles, scales or tiles in another order than the reader's: white images; a silent fall back to 16 bits",
    65: "an old checkpoint no longer loads",
    66: "a newer checkpoint loads in an older version and gives noise",
    68: "torch.compile breaks on quantized layers",
    71: "a cast to another dtype ends in mismatches, or in damaged scales",
    72: "NaN in a weight passes unseen",
    73: "quantizing while loading needs more memory than the 16-bit model",
    75: "prompts of different length, or guidance that is off, break calibration",
    78: "patterns miss layers inside nn.Sequential",
}
HEAD = """# Failures that must not come back

What users of quantization tools reported, in our words, and the tests that hold it off.
`tests/known_failures/test_table.py` checks that every case has a test and that every test named here exists;
`DQ_WRITE_DOCS=1` in its environment lets it write this page anew.

| case | what must not happen | tests |
|---|---|---|
"""


def cases_of(name: str) -> set[int]:
    """`test_F48_x` -> {48}; `test_F52_F62_y` -> {52, 62}."""
    lead = re.match(r"test_((?:[fF]\d{1,2}_)+)", name)
    return {int(n) for n in re.findall(r"\d+", lead.group(1))} if lead else set()


def tests_by_case(root) -> dict[int, list[str]]:
    """case -> `path::name` of every test function that carries its number."""
    found: dict[int, list[str]] = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                for case in cases_of(node.name):
                    found.setdefault(case, []).append(f"{path.relative_to(root).as_posix()}::{node.name}")
    return found


def page(found: dict[int, list[str]]) -> str:
    rows = [f"| F{n} | {text} | {', '.join(f'`{t}`' for t in found.get(n, []))} |" for n, text in CASES.items()]
    return HEAD + "\n".join(rows) + "\n"


@pytest.fixture(scope="module")
def found(root):
    return tests_by_case(root)


def test_every_case_has_a_test(found):
    assert not [f"F{n}: {text}" for n, text in CASES.items() if n not in found]
    assert not set(found) - set(CASES), "tests of cases that the table lacks"


def test_the_page_names_tests_that_exist(root, found):
    path = root / "docs" / "known_failures.md"
    if os.environ.get("DQ_WRITE_DOCS"):
        path.write_text(page(found), encoding="utf-8")
    text = path.read_text(encoding="utf-8")
    assert text.startswith(HEAD)
    rows = {
        int(n): (what, tests) for n, what, tests in re.findall(r"^\| F(\d+) \| (.*) \| (.*) \|$", text, re.MULTILINE)
    }
    assert {n: what for n, (what, _) in rows.items()} == CASES
    for number, (_, tests) in rows.items():
        named = re.findall(r"`([^`]+)`", tests)
        assert named and set(named) <= set(found[number]), f"F{number} names tests that are not there"


def test_the_table_is_complete(root):
    """Against the list of reports it was made from, where that lies beside the checkout."""
    source = root.parent / "shared" / "spec" / "known_failures.md"
    if not source.is_file():
        pytest.skip("the list of reports is not here")
    numbers = {int(n) for n in re.findall(r"^\| F(\d+) \|", source.read_text(encoding="utf-8"), re.MULTILINE)}
    assert numbers == set(CASES)


def test_names_are_read_as_written():
    assert cases_of("test_F01_x") == {1} and cases_of("test_F52_F62_x") == {52, 62} and cases_of("test_f34_x") == {34}
    assert cases_of("test_nf4_double") == cases_of("test_x_F12_y") == set()
