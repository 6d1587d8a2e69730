"""quantize, eval and bench of language models from the shell."""

import json
import shutil
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM

from dq.pipelines.loading import load


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
        "--min-features", 16, "--out", out, "--device", "cpu", "--sequential", "linears",
    )  # fmt: skip
    assert status == 0, err
    assert "saved to" in said and "tokenizer" in said
    kept = json.loads((out / "config.json").read_text())["quantization_config"]
    assert kept["calibration"]["sequential"] == "linears"
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
        (["quantize", folder, "w4a16-gptq", "--text", short, "--out", out], "one window needs 128"),
        (["quantize", folder, "w4a16-gptq", "--text", calib, "--length", 0, "--out", out], "--length must be at least"),
        (["quantize", folder, "fp8", "--samples", 3, "--out", out], "--samples goes with --text"),
        (["quantize", folder, "fp8", "--text", calib, "--prompts", calib, "--out", out], "give one of them"),
        (["eval", folder, "--reference", folder], "language models on --text FILE"),
        (["eval", folder, "--reference", folder, "--text", score, "--metrics", "psnr"], "--metrics goes with --prom"),
        (["quantize", folder, "fp8", "--text", calib, "--steps", 3, "--out", out], "--steps goes with --prompts FILE"),
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


def test_windows_are_no_longer_than_the_model(dq_, folder, texts, tmp_path):
    """Without --length they take all positions where the model has fewer than the default."""
    short = tmp_path / "short"
    shutil.copytree(folder, short)
    config = json.loads((short / "config.json").read_text()) | {"max_position_embeddings": 40}
    (short / "config.json").write_text(json.dumps(config))
    small, machine = ("--min-features", 16), ("--device", "cpu")
    text = ("--text", texts / "calib.txt")
    with pytest.warns(UserWarning, match="fills [0-9]+ windows of 40 tokens, not 128: all are used"):
        status, _, err = dq_("quantize", short, "w4a16-gptq", *text, *small, "--out", tmp_path / "o", *machine)
    assert status == 0, err
    assert "windows of 40 tokens" in dq_("inspect", tmp_path / "o")[1]
    status, said, err = dq_("eval", tmp_path / "o", "--reference", short, *text, "--count", 2, *machine)
    assert status == 0 and "kl[40]" in said, err
    status, _, err = dq_("eval", tmp_path / "o", "--reference", short, *text, "--length", 41, *machine)
    assert status == 2 and "longer than the 40 positions" in err


def test_eval_says_that_the_reference_is_another_model(dq_, folder, texts, llm, tmp_path):
    torch.manual_seed(5)
    llm.decoder(dtype=torch.bfloat16).save_pretrained(tmp_path / "other")
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "other", dtype=torch.bfloat16)
    with torch.no_grad():
        other.get_input_embeddings().weight.mul_(1.5)
    other.save_pretrained(tmp_path / "other")
    for file in folder.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "other")
    small = ("--min-features", 16, "--device", "cpu")
    assert dq_("quantize", folder, "int8", *small, "--out", tmp_path / "o")[0] == 0
    text = ("--text", texts / "score.txt", "--length", 32, "--count", 2, "--device", "cpu")
    with pytest.warns(UserWarning, match=r"/o is measured against another model than it was made from: .*embed_tokens"):
        status, said, err = dq_("eval", tmp_path / "o", "--reference", tmp_path / "other", *text)
    assert status == 0 and "kl[32]" in said, err
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert dq_("eval", tmp_path / "o", "--reference", folder, *text)[0] == 0


def test_an_unused_text_is_said(dq_, folder, texts, tmp_path):
    status, said, err = dq_(
        "quantize", folder, "int8", "--text", texts / "calib.txt", "--min-features", 16, "--out", tmp_path / "o",
        "--device", "cpu",
    )  # fmt: skip
    assert status == 0, err
    assert "--text is not used" in said


def test_bench_of_caches_files_and_other_libraries(dq_, folder, texts, tmp_path, monkeypatch):
    """A cache and a file are rows like any other, and a library that is not there is a row with the reason."""
    from dq.eval.bench import llm_peers

    recipe = tmp_path / "mine.toml"
    recipe.write_text('name = "mine"\n[linear]\nweights = "int8/channel"\n')
    monkeypatch.setitem(llm_peers.PEERS, "other W8A8", ("no_such_library", llm_peers.torchao(lambda ao: None)))
    path = tmp_path / "x.json"
    status, said, err = dq_(
        "bench", "llm", "--model", folder, "--text", texts / "score.txt", "--calibration", texts / "calib.txt",
        "--recipes", "KV8 INT8", "KV4 INT4 QuaRot", recipe, "other W8A8", "--windows", 2, "--length", 64,
        "--samples", 2, "--min-features", 16, "--device", "cpu", "--json", path,
    )  # fmt: skip
    assert status == 0, err
    rows = {r["recipe"]: r for r in json.loads(path.read_text())["rows"]}
    assert rows["other W8A8"]["failed"] == "not installed" and "other W8A8: not installed" in said
    assert 8 < rows["KV8 INT8"]["bits"] < 11 and 4 < rows["KV4 INT4 QuaRot"]["bits"] < 7
    assert 0 < rows["KV8 INT8"]["kl[64]"]["value"] < rows["KV4 INT4 QuaRot"]["kl[64]"]["value"]
    assert 8 < rows[str(recipe)]["bits"] < 10
    assert dq_("bench", "llm", "--list")[1].splitlines()[0] == "W8A8 INT8"


def test_every_row_is_a_recipe():
    from dq.eval.bench import llm_methods

    rows = llm_methods.names()
    assert len(set(rows)) == len(rows) > 40
    for name in llm_methods.METHODS:
        assert llm_methods.recipe(name) is not None


def test_bytes_that_other_libraries_hold():
    from dq.eval.bench.llm_peers import elements, held, stored

    layer, other = (torch.nn.Linear(8, 4, dtype=torch.bfloat16) for _ in range(2))
    assert held(layer.weight) == stored(layer) == 64
    assert elements(torch.nn.ModuleDict({"lm_head": layer, "proj": other})) == 32


def test_correct(dq_, folder, texts, tmp_path):
    """A quantized folder learns from its 16-bit one; what could not work is refused before anything is loaded."""
    q, out = tmp_path / "q", tmp_path / "out"
    small = ["--min-features", 16, "--device", "cpu"]
    assert dq_("quantize", folder, "w4a4-int4", "--out", q, *small)[0] == 0
    call = ["correct", q, "--reference", folder, "--text", texts / "calib.txt", "--length", 32, "--samples", 16]
    call += ["--train-steps", 20, "--rate", 5e-3, "--micro-batch", 4, "--device", "cpu"]
    status, said, err = dq_(*call, "--norms", "--out", out)
    assert status == 0, err
    assert "KL on held-out tokens" in said and "saved to" in said and "tokenizer" in said
    with torch.no_grad():
        ids = torch.arange(3, 40)[None]
        logits = [load(str(f), torch.bfloat16, "cpu")(ids).logits for f in (q, out)]
    assert not torch.equal(*logits)
    for more, match in (
        (["--out", q], "give another folder, both models stay"),
        (["--out", folder], "give another folder, both models stay"),
        (["--out", tmp_path / "x", "--rank", 0], "nothing is to learn"),
        (["--out", tmp_path / "x", "--batch", 0], "--batch must be at least 1"),
        (["--out", tmp_path / "x", "--rate", "nan"], "rate is a number above 0"),
        (["--out", tmp_path / "x", "--layers", "up_porj"], "did you mean"),
        (["--out", tmp_path / "x", "--reference", q], "the reference of a correction is the 16-bit model"),
        (["--out", tmp_path / "x", "--rate", 30], "nothing was gained, so nothing is saved"),
    ):
        status, _, err = dq_(*call, *more)
        assert status == 2 and match in err and not (tmp_path / "x").exists()
    status, _, err = dq_("correct", folder, *call[2:], "--out", tmp_path / "x")
    assert status == 2 and "is quantized: dq.quantize it first" in err
