"""The command line in process: exit codes, one-line errors, and what is refused before a model is loaded."""

import inspect
import json
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dq
from dq.checks import output_folder
from dq.cli import main
from dq.eval.bench import kernels


@pytest.fixture
def refused(dq_, monkeypatch):
    """refused(...) -> the one line on stderr of a command that never got to load a model."""

    def run(*argv):
        with monkeypatch.context() as m:
            m.setattr("dq.pipelines.loading.load", lambda *a: pytest.fail("a model was loaded"))
            status, _, err = dq_(*argv)
        assert status == 2 and err.count("\n") == 1 and err.startswith("dq: ") and "Traceback" not in err
        return err

    return run


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """The demo, quantized by the command line."""
    out = tmp_path_factory.mktemp("cli") / "fp8"
    assert main(["quantize", dq.demo_path(), "fp8", "--out", str(out), "--device", "cpu"]) == 0
    return out


@pytest.fixture(scope="module")
def llm(tiny, tmp_path_factory):
    """A language model with its tokenizer."""
    folder = tmp_path_factory.mktemp("llm")
    tiny.llama(torch.bfloat16).save_pretrained(folder)
    tiny.t5_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(dq.demo_prompts(3)))
    return path


@pytest.fixture
def seen(monkeypatch):
    """The keyword arguments of every pipeline call; two steps are enough to look at them."""
    from diffusers import FluxPipeline

    calls, original = [], FluxPipeline.__call__

    def call(self, prompt=None, num_inference_steps=28, height=None, width=None, max_sequence_length=512, **kwargs):
        calls.append(dict(steps=num_inference_steps, height=height, width=width, text=max_sequence_length))
        small = dict(num_inference_steps=2, height=64, width=64, max_sequence_length=32)
        return original(self, prompt, **small, **kwargs)

    call.__signature__ = inspect.signature(original)
    monkeypatch.setattr(FluxPipeline, "__call__", call)
    return calls


DEMO = dict(steps=20, height=128, width=128, text=32)


def test_generate_knows_a_quantized_demo(dq_, quantized, seen, tmp_path):
    status, out, bars = dq_("generate", quantized, "sunflower", "--out", tmp_path / "a" / "x.png", "--device", "cpu")
    assert status == 0 and "x.png" in out and seen == [DEMO] and (tmp_path / "a" / "x.png").stat().st_size > 500
    assert "2/2" in bars and "evaluate" not in bars  # the bar counts steps


def test_eval_knows_a_demo(dq_, quantized, seen, prompts, tmp_path):
    out = tmp_path / "r.json"
    few = ("--count", 2, "--metrics", "psnr", "--records", 4, "--batch-size", 2, "--seed", 3, "--device", "cpu")
    status, text, _ = dq_("eval", quantized, "--reference", dq.demo_path(), "--prompts", prompts, "--out", out, *few)
    assert status == 0 and seen == [DEMO] * 2 and "model-error" in text
    found = json.loads(out.read_text())
    assert len(found["prompts"]) == 2 and found["settings"]["seed"] == 3 and found["settings"]["records"] <= 4
    candidate = found["candidates"][0]
    assert candidate["recipe"] == "fp8" and "demo/weights" in candidate["plan"]  # from the checkpoint itself


def test_quantize_calibrates_with_what_was_given(dq_, prompts, tmp_path, monkeypatch):
    made = []
    original = dq.Prompts.__init__
    monkeypatch.setattr(dq.Prompts, "__init__", lambda s, *a, **k: made.append(k) or original(s, *a, **k))
    status, _, err = dq_("quantize", dq.demo_path(), "int8-smooth", "--prompts", prompts, "--steps", 2, "--records", 4,
                         "--batch-size", 3, "--seed", 7, "--out", tmp_path / "o", "--device", "cpu")  # fmt: skip
    assert status == 0, err
    assert {k: made[0][k] for k in ("steps", "records", "batch_size", "seed", "height")} == dict(
        steps=2, records=4, batch_size=3, seed=7, height=128
    )
    config = json.loads((tmp_path / "o" / "transformer" / "config.json").read_text())["quantization_config"]
    assert config["calibration"]["seed"] == 7 and config["calibration"]["prompts"] == 3


def test_prompts_of_a_data_free_recipe_are_read_and_left(dq_, prompts, refused, tmp_path):
    status, out, _ = dq_("quantize", dq.demo_path(), "fp8", "--prompts", prompts, "--out", tmp_path / "o")
    assert status == 0 and "recipe fp8 needs no calibration: --prompts is not used" in out
    assert "cannot read prompts" in refused("quantize", dq.demo_path(), "fp8", "--prompts", "no.txt", "--out", "o")


def test_a_language_model_keeps_its_tokenizer(dq_, llm, tmp_path):
    out = tmp_path / "q"
    status, text, _ = dq_("quantize", llm, "int8", "--min-features", 16, "--out", out, "--device", "cpu")
    assert status == 0 and "with " in text and "tokenizer.json" in text
    status, text, _ = dq_("generate", out, "a cat", "--max-new-tokens", 3, "--device", "cpu")
    assert status == 0 and text
    for file in out.glob("tokenizer*"):
        file.unlink()
    status, _, err = dq_("generate", out, "a cat", "--device", "cpu")
    assert status == 2 and "has no tokenizer" in err and err.count("\n") == 1


def test_a_lone_transformer_generates_nothing(dq_, quantized):
    status, _, err = dq_("generate", quantized / "transformer", "a cat", "--device", "cpu")
    assert status == 2 and "a lone FluxTransformer2DModel" in err and "whole pipeline" in err


def test_models_where_pipelines_are_meant(refused, llm, prompts, tmp_path):
    err = refused("quantize", llm, "int8-smooth", "--prompts", prompts, "--out", tmp_path / "o")
    assert "can only calibrate pipelines" in err and "calibration=[dict(input_ids=ids)" in err
    assert "is a model; it is compared on --text FILE" in refused("eval", llm, "--reference", llm, "--prompts", prompts)
    for name in ("x.png", "x.txt"):
        assert "--out is for images" in refused("generate", llm, "a", "--out", tmp_path / name)
    assert "--height is for images; " in refused("generate", llm, "a", "--height", 64)


NUMBERS = [
    ("--steps", "0"), ("--steps", "-1"), ("--height", "0"), ("--max-sequence-length", "-3"), ("--seed", "-1"),
    ("--seed", "1" + "0" * 23), ("--guidance-scale", "nan"), ("--true-cfg-scale", "inf"),
]  # fmt: skip


@pytest.mark.parametrize(("option", "value"), NUMBERS)
def test_numbers_are_checked_first(refused, prompts, tmp_path, option, value):
    demo, given = dq.demo_path(), f"{option}={value}"
    for argv in (
        ("generate", demo, "a", given),
        ("quantize", demo, "fp8", "--out", tmp_path / "o", given),
        ("eval", demo, "--reference", demo, "--prompts", prompts, given),
    ):
        assert option in refused(*argv)


def test_more_numbers(refused, prompts, tmp_path):
    demo = dq.demo_path()
    for option in ("--count=-1", "--count=0", "--batch-size=0", "--records=0"):
        assert option.split("=")[0] in refused("eval", demo, "--reference", demo, "--prompts", prompts, option)
    for option in ("--batch-size=0", "--records=-1", "--min-features=-3"):
        assert option.split("=")[0] in refused("quantize", demo, "fp8", "--out", tmp_path / "o", option)
    assert "--max-new-tokens" in refused("generate", demo, "a", "--max-new-tokens", 0)
    assert "prompts must be at least 1 and at most 240" in refused("demo", "--prompts", 0)


def test_outputs_are_checked_first(refused, prompts, tmp_path, monkeypatch):
    demo, file, empty = dq.demo_path(), tmp_path / "file", tmp_path / "empty"
    file.write_text("")
    empty.mkdir()
    evaluate = ("eval", demo, "--reference", demo, "--prompts", prompts)
    for command in (("demo",), evaluate):
        assert "use .html or .json" in refused(*command, "--out", tmp_path / "r.pdf")
        assert "cannot write" in refused(*command, "--out", "/proc/r.html")
        assert "cannot write" in refused(*command, "--out", file / "r.html")
    assert "use .png" in refused("generate", demo, "a", "--out", "x.doc")
    for out in (file, "/proc/o"):
        assert "cannot write" in refused("quantize", demo, "fp8", "--out", out)
    for command in (("chat", demo), ("quantize", demo, "int8-smooth", "--text", prompts, "--out", tmp_path / "o")):
        assert "is a pipeline, no language model" in refused(*command)
    learn = ("correct", demo, "--reference", demo, "--text", prompts, "--out", tmp_path / "o")
    assert "use dq.correct(pipe, reference, dq.Prompts([...])) in Python" in refused(*learn)
    assert "is the source" in refused("quantize", demo, "fp8", "--out", demo)
    assert "cannot write" in refused("quantize", demo, "fp8", "--out", tmp_path / "o", "--resume", file)
    assert "it is a file, and a folder is to be written" in refused("quantize", demo, "fp8", "--out", file)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=2_000_000))
    with pytest.raises(dq.DQError, match=r"it takes 3 MB, and 2 MB are free there"):
        output_folder(tmp_path / "o", 3_000_000)
    assert output_folder(tmp_path / "o", 2_000_000) == tmp_path / "o"
    assert "holds neither a tokenizer nor a model" in refused("chat", empty, "hello")
    assert refused("plan", demo, "zzz").endswith("... (dq list recipes)\n")
    assert "did you mean 'fp8'?" in refused("plan", demo, "FP8")
    (tmp_path / "mine.toml").write_text('name = "mine"\n[linear]\nweights = "int4/grp64"\n')
    assert "mine.toml: unknown strategy 'grp64'; did you" in refused("plan", demo, tmp_path / "mine.toml")
    assert not (tmp_path / "o").exists()


def test_inputs_are_checked_first(refused, prompts, tmp_path):
    demo = dq.demo_path()
    evaluate = ("eval", demo, "--reference", demo)
    (tmp_path / "empty.txt").write_text("\n")
    assert "empty.txt holds no prompts" in refused(*evaluate, "--prompts", tmp_path / "empty.txt")
    assert "is named twice" in refused("eval", demo, demo, "--reference", demo, "--prompts", prompts)
    assert "did you mean 'psnr'" in refused(*evaluate, "--prompts", prompts, "--metrics", "psnt")
    assert "did you mean 'psnr'" in refused("demo", "--metrics", "psnt")
    assert "unknown dtype" in refused("plan", demo, "fp8", "--dtype", "fp99")
    assert "needs calibration: give --prompts" in refused("quantize", demo, "int8-smooth", "--out", tmp_path / "o")
    assert "named twice" in refused("demo", "--recipes", "fp8", "fp8")
    assert "device 'foo'" in refused("demo", "--device", "foo")


def test_all_that_is_compared_is_looked_for_first(refused, llm, prompts, tmp_path):
    """Not when its turn comes, after the reference was measured."""
    (tmp_path / "empty").mkdir()
    demo, missing = dq.demo_path(), "no-such-folder"
    for name, words in ((missing, f"'{missing}' is no local folder"), (tmp_path / "empty", "it is no pipeline and no")):
        assert words in refused("eval", demo, name, "--reference", demo, "--prompts", prompts)
        assert words in refused("eval", llm, name, "--reference", llm, "--text", prompts)
    assert "it is compared on --prompts FILE" in refused("eval", llm, demo, "--reference", llm, "--text", prompts)


def test_sources(dq_):
    for name, match in {"": "the source is empty", "/nope": "/nope: no such folder"}.items():
        for argv in (("plan", name, "fp8"), ("inspect", name), ("generate", name, "a")):
            status, _, err = dq_(*argv)
            assert status == 2 and match in err and err.count("\n") == 1


def test_a_damaged_folder_is_one_line(dq_, quantized, tmp_path):
    folder = shutil.copytree(quantized, tmp_path / "bad")
    weights = next((folder / "transformer").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-10])
    for argv in (("plan", folder, "fp8"), ("inspect", folder), ("generate", folder, "a")):
        status, _, err = dq_(*argv, *(["--device", "cpu"] if argv[0] != "inspect" else []))
        assert status == 2 and "bad" in err and err.count("\n") == 1


@pytest.mark.parametrize("command", ["quantize", "eval", "generate"])
def test_what_a_pipeline_refuses_is_one_line(dq_, quantized, prompts, tmp_path, command):
    demo = dq.demo_path()
    words = {
        "quantize": (demo, "int8-smooth", "--prompts", prompts, "--out", tmp_path / "o"),
        "eval": (quantized, "--reference", demo, "--prompts", prompts, "--out", tmp_path / "r.html"),
        "generate": (demo, "a cat", "--out", tmp_path / "x.png"),
    }[command]
    status, _, err = dq_(command, *words, "--max-sequence-length", 600, "--device", "cpu")
    said = err.splitlines()[-1]
    assert status == 2 and said.startswith("dq: FluxPipeline refuses this call: `max_sequence_length` cannot be"), err
    assert "Traceback" not in err


@pytest.mark.parametrize("error", [ValueError, TypeError, RuntimeError])
def test_other_errors_keep_their_trace(monkeypatch, error):
    def broken(args):
        raise error("a bug")

    monkeypatch.setattr("dq.commands.catalogue", broken)
    with pytest.raises(error, match="a bug"):
        main(["list"])


def test_sizes_that_do_not_fit_are_one_line(dq_, monkeypatch, tmp_path):
    """torch says so below the call of a pipeline; an error of dq's own layers there keeps its trace."""
    words = ("generate", dq.demo_path(), "a", "--steps", 1, "--out", tmp_path / "x.png", "--device", "cpu")
    status, _, err = dq_(*words, "--height", 8, "--width", 8)
    last = err.splitlines()[-1]
    assert status == 2 and last.startswith("dq: FluxPipeline fails in this call: ") and "size" in last, err
    status, _, err = dq_(*words, "--height", 10**7, "--width", 10**7)
    assert status == 2 and err.splitlines()[-1].startswith("dq: out of memory, for this model or this size"), err

    inside = {"__name__": "dq.made"}
    exec("def broken(*args, **kwargs):\n    raise RuntimeError('a bug')", inside)
    monkeypatch.setattr("dq.eval.generate._Watch.__call__", inside["broken"])
    with pytest.raises(RuntimeError, match="a bug"):
        dq_(*words)


def test_a_model_that_gives_nan_says_so(dq_, llm, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(llm, tmp_path / "nan")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    status, out, err = dq_("generate", folder, "a cat", "--max-new-tokens", 2, "--device", "cpu")
    assert status == 2 and not out and "gave NaN in place of a token" in err and err.count("\n") == 1


def test_a_component_that_is_missing(dq_, tmp_path):
    """diffusers makes a tokenizer without words, and looks for a VAE in the pipeline's own folder."""
    for name in ("tokenizer", "vae"):
        folder = shutil.copytree(dq.demo_path(), tmp_path / name)
        shutil.rmtree(folder / name)
        for argv in (("plan", folder, "fp8"), ("generate", folder, "a"), ("inspect", folder)):
            status, _, err = dq_(*argv)
            assert status == 2 and f"names the component {name!r}, whose folder is missing" in err


def test_quiet_commands(dq_, quantized, recwarn):
    status, out, err = dq_("inspect", quantized)
    assert status == 0 and "fp8_e4m3" in out and not err
    status, out, err = dq_("plan", dq.demo_path(), "fp8", "--device", "cpu")
    assert status == 0 and "-> " in out and "torchao" not in err and "Loading" not in err
    assert not [w for w in recwarn if "_pytree" in str(w.filename)]
    assert dq_("list", "nothing")[0] == 2 and dq_("list", "recipes")[0] == 0


def test_warnings_are_one_line(dq_, monkeypatch):
    """Of dq itself; what other packages warn of keeps its place."""
    beside = str(Path(dq.__file__).parents[1] / ".venv" / "lib" / "other.py")
    files, shown = (dq.__file__, kernels.__file__, torch.__file__, beside), []

    def command(args):
        shown.extend(warnings.formatwarning("two\nlines", UserWarning, f, 3) for f in files)

    monkeypatch.setattr("dq.commands.doctor", command)
    assert dq_("doctor")[0] == 0
    assert shown[:2] == ["dq: warning: two lines\n"] * 2
    assert shown[2:] == [f"{f}:3: UserWarning: two\nlines\n" for f in files[2:]]
    assert "dq: warning" not in warnings.formatwarning("two", UserWarning, dq.__file__, 3)


def test_the_parser_refuses_in_one_line(refused, capsys):
    """Without the usage of all options; what nothing takes is told by the command that was given it."""
    cases = [
        ([], "required: COMMAND (see dq --help)"),
        (["quantise", "x"], "invalid choice: 'quantise'"),
        (["quantize", "x", "fp8"], "required: --out (see dq quantize --help)"),
        (["correct", "x", "--reference", "y", "--text", "z", "--out", "o", "--steps", 5],
         "dq correct takes no --steps 5; did you mean --train-steps?"),
        (["eval", "x", "--reference", "y", "--samples=3"], "dq eval takes no --samples=3 (see dq eval --help)"),
        (["bench", "llm", "--windows", "many"], "invalid int value: 'many' (see dq bench llm --help)"),
    ]  # fmt: skip
    for argv, match in cases:
        assert match in refused(*argv), argv
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0 and dq.__version__ in capsys.readouterr().out


@pytest.mark.parametrize(("more", "said"), [([], ""), (["--resume", "R"], "; the same command continues from R")])
def test_an_interruption_says_how_to_go_on(monkeypatch, capsys, more, said):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("dq.commands.quantize", interrupted)
    assert main(["quantize", "D", "fp8", "--out", "O", *more]) == 130
    assert capsys.readouterr().err == f"dq: interrupted{said}\n"
