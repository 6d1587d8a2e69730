"""quantize, eval and bench of language models from the shell."""

import json

import pytest
import torch

from dq.cli import main


@pytest.fixture
def dq_(capsys):
    """dq_(...) -> (exit status, stdout, stderr)."""

    def run(*argv):
        status = main([str(a) for a in argv])
        return status, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def folder(llm, tiny, tmp_path_factory):
    """A language model with its tokenizer."""
    path = tmp_path_factory.mktemp("llm")
    llm.decoder(dtype=torch.bfloat16).save_pretrained(path)
    tiny.t5_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def texts(llm, tmp_path_factory):
    """Two files: one that calibrates, one that scores."""
    path = tmp_path_factory.mktemp("text")
    (path / "calib.txt").write_text(llm.text)
    (path / "score.txt").write_text(llm.text[::-1])
    return path


def test_quantize_and_eval(dq_, folder, texts, tmp_path):
    out, numbers = tmp_path / "q", tmp_path / "n.json"
    status, said, err = dq_(
        "quantize", folder, "w4a16-gptq", "--text", texts / "calib.txt", "--samples", 4, "--length", 32,
        "--min-features", 16, "--out", out, "--device", "cpu",
    )  # fmt: skip
    assert status == 0, err
    assert "saved to" in said and "tokenizer" in said
    assert "calibrated on 4 windows of 32 tokens" in dq_("inspect", out)[1]
    status, said, err = dq_(
        "eval", out, "--reference", folder, "--text", texts / "score.txt", "--length", 32, "--stride", 16,
        "--count", 4, "--out", numbers, "--device", "cpu",
    )  # fmt: skip
    assert status == 0, err
    assert "kl[32/16]" in said and str(out) in said
    scores = json.loads(numbers.read_text())["scores"]
    assert 0 < scores[str(out)]["kl[32/16]"]["value"] < 1


@pytest.mark.parametrize("extra", [[], ["--off-lattice"]])
def test_bench(dq_, folder, texts, tmp_path, extra):
    path, table = tmp_path / "x.json", tmp_path / "x.md"
    status, said, err = dq_(
        "bench", "llm", "--model", folder, "--text", texts / "score.txt", "--calibration", texts / "calib.txt",
        "--recipes", "int8", "w4a16-gptq", "--windows", 3, "--length", 32, "--samples", 4, "--min-features", 16,
        "--device", "cpu", "--json", path, "--markdown", table, *extra,
    )  # fmt: skip
    assert status == 0, err
    rows = {r["recipe"]: r for r in json.loads(path.read_text())["rows"]}
    assert list(rows) == ["16-bit", "int8", "w4a16-gptq"] and rows["16-bit"]["bits"] == 16
    assert 8 < rows["int8"]["bits"] < 9 and 4 < rows["w4a16-gptq"]["bits"] < 6
    assert rows["int8"]["kl[32]"]["value"] < rows["w4a16-gptq"]["kl[32]"]["value"]
    assert "93 tokens" in said and ("off the lattice" in said) == bool(extra) and "| int8 |" in table.read_text()


def test_what_is_refused(dq_, folder, texts, tmp_path, monkeypatch):
    monkeypatch.setattr("dq.pipelines.loading.load", lambda *a: pytest.fail("a model was loaded"))
    score, calib, out = texts / "score.txt", texts / "calib.txt", tmp_path / "o"
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    cases = [
        (["quantize", folder, "w4a16-gptq", "--out", out], "--text FILE"),
        (["quantize", folder, "w4a16-gptq", "--text", tmp_path / "no.txt", "--out", out], "cannot read text from"),
        (["quantize", folder, "w4a16-gptq", "--text", short, "--out", out], "one window needs 2048"),
        (["quantize", folder, "w4a16-gptq", "--text", calib, "--length", 0, "--out", out], "--length must be at least"),
        (["quantize", folder, "fp8", "--samples", 3, "--out", out], "--samples goes with --text"),
        (["quantize", folder, "fp8", "--text", calib, "--prompts", calib, "--out", out], "give one of them"),
        (["eval", folder, "--reference", folder], "language models on --text FILE"),
        (["eval", folder, "--reference", folder, "--text", tmp_path / "no.txt"], "cannot read text"),
        (["eval", folder, folder, "--reference", folder, "--text", score], "is named twice"),
        (["bench", "llm", "--model", folder, "--text", score, "--recipes", "w4a16-gptq"], "need --calibration FILE"),
        (["bench", "llm", "--model", folder, "--text", score, "--calibration", score, "--recipes", "w4a16-gptq"],
         "flatter the recipes"),
        (["bench", "llm", "--model", folder, "--text", score, "--recipes", "fp8", "fp8"], "named twice"),
        (["bench", "llm", "--model", folder, "--text", score, "--recipes", "fp9"], "unknown recipe"),
    ]  # fmt: skip
    for argv, match in cases:
        status, _, err = dq_(*argv)
        assert status == 2 and match in err and err.count("\n") == 1, (argv, err)


def test_an_unused_text_is_said(dq_, folder, texts, tmp_path):
    status, said, err = dq_(
        "quantize", folder, "int8", "--text", texts / "calib.txt", "--min-features", 16, "--out", tmp_path / "o",
        "--device", "cpu",
    )  # fmt: skip
    assert status == 0, err
    assert "--text is not used" in said
