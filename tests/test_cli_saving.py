"""Where commands save: what is known of the place before the work begins, and where the result goes if it fails."""

import re
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dq

FULL = "I/O error: No space left on device (os error 28)"


@pytest.fixture
def llm(tiny, tmp_path):
    """The folder of a language model with its tokenizer."""
    folder = tmp_path / "llm"
    tiny.llama(torch.bfloat16).save_pretrained(folder)
    tiny.t5_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def full(monkeypatch, tmp_path):
    """full(*folders): below these, models get as far as config.json; temporary files lie in tmp_path / "spare"."""
    from transformers import PreTrainedModel

    (tmp_path / "spare").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "spare"))
    original = PreTrainedModel.save_pretrained

    def fill(*folders):
        def save(self, place, *args, **kwargs):
            original(self, place, *args, **kwargs)
            there = Path(place).resolve()
            if any(Path(f).resolve() in (there, *there.parents) for f in folders):
                (there / "model.safetensors").unlink()
                raise OSError(FULL)

        monkeypatch.setattr(PreTrainedModel, "save_pretrained", save)

    return fill


def quantize(dq_, llm, out):
    return dq_("quantize", llm, "int8", "--min-features", 16, "--out", out, "--device", "cpu")


def found(err):
    """The folder that the message names."""
    return Path(re.search(r"the result is in (\S+): move it from there\n", err)[1])


def check(place, out):
    """A whole checkpoint is in `place`, and nothing in `out`."""
    model = dq.load(place)
    assert dq.layer_info(model) and (place / "tokenizer.json").is_file() and not out.exists()


def test_a_full_disk_at_the_end(dq_, llm, full, tmp_path):
    """The folder is on a full disk: a folder beside it, where there is room, takes the result."""
    disk = tmp_path / "disk"
    out = disk / "out"
    full(out)
    status, text, err = quantize(dq_, llm, out)
    assert status == 2 and err.splitlines()[-1].startswith(f"dq: cannot save to {out}: {FULL}"), err
    assert "saved to" not in text and found(err).parent == disk
    check(found(err), out)


def test_nowhere_beside_it(dq_, llm, full, tmp_path):
    """Nothing on that disk can be written: the directory of temporary files takes the result; no part is left."""
    disk = tmp_path / "disk"
    full(disk)
    status, _, err = quantize(dq_, llm, disk / "out")
    assert status == 2 and found(err).parent == tmp_path / "spare"
    check(found(err), disk / "out")
    assert not list(disk.iterdir())


def test_nowhere_at_all(dq_, llm, full, tmp_path):
    full(tmp_path)
    status, _, err = quantize(dq_, llm, tmp_path / "disk" / "out")
    last = err.splitlines()[-1]
    assert status == 2 and last.count(FULL) == 3 and "--resume FOLDER keeps finished blocks" in last
    assert not list((tmp_path / "spare").iterdir()) and not list((tmp_path / "disk").iterdir())


def test_a_folder_that_was_there_keeps_what_it_held(dq_, llm, full, tmp_path, monkeypatch):
    """Also the one that the shell is in, whose name is a dot."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    full(out)
    monkeypatch.chdir(out)
    for name in (out, "."):
        status, _, err = quantize(dq_, llm, name)
        assert status == 2 and (out / "notes.txt").read_text() == "mine"
        assert found(err).parent == tmp_path and found(err).name.startswith("out-")
        assert dq.layer_info(dq.load(found(err)))


def test_a_checkpoint_that_was_there_stays_whole(dq_, llm, full, tmp_path):
    """A model is not written over until the new one is complete; then nothing of the old one is left."""
    out = tmp_path / "out"
    assert quantize(dq_, llm, out)[0] == 0
    (out / "notes.txt").write_text("mine")
    (out / "model-00002-of-00002.safetensors").write_text("of an older model")
    (out / "other.safetensors").write_text("mine")
    before = {f.name: f.read_bytes() for f in out.iterdir()}
    full(tmp_path)
    status, _, err = dq_("quantize", llm, "w4a16", "--min-features", 16, "--out", out, "--device", "cpu")
    assert status == 2 and "No space left" in err and before == {f.name: f.read_bytes() for f in out.iterdir()}
    full()
    assert dq_("quantize", llm, "w4a16", "--min-features", 16, "--out", out, "--device", "cpu")[0] == 0
    assert "int4" in str(dq.layer_info(dq.load(out)))
    assert {f.name for f in out.iterdir()} == before.keys() - {"model-00002-of-00002.safetensors"}


@pytest.mark.parametrize("when", ["new", "there", "elsewhere"])
def test_interrupted_while_saving(dq_, llm, full, tmp_path, monkeypatch, when):
    """Ctrl-C leaves neither part of a model nor a folder that nobody has heard of."""
    from transformers import PreTrainedModel

    out = tmp_path / "disk" / "out"
    full(*([out] if when == "elsewhere" else []))
    if when == "there":
        out.mkdir(parents=True)
        (out / "notes.txt").write_text("mine")
    original = PreTrainedModel.save_pretrained

    def save(self, place, *args, **kwargs):
        original(self, place, *args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", save)
    status, _, err = quantize(dq_, llm, out)
    assert status == 130 and not list((tmp_path / "spare").iterdir()), err
    left = [f.relative_to(tmp_path / "disk") for f in (tmp_path / "disk").rglob("*") if f.is_file()]
    assert left == ([Path("out/notes.txt")] if when == "there" else [])


def test_a_tokenizer_that_cannot_be_copied(dq_, llm, full, tmp_path, monkeypatch):
    """The model is whole without it, and stays where it is."""
    full()
    monkeypatch.setattr("dq.pipelines.loading.shutil.copyfile", lambda *a: (_ for _ in ()).throw(OSError(FULL)))
    status, _, err = quantize(dq_, llm, tmp_path / "out")
    assert status == 2 and f"the model is saved in {tmp_path / 'out'}, but its tokenizer is not: {FULL}" in err
    monkeypatch.undo()
    assert dq.layer_info(dq.load(tmp_path / "out"))


def test_a_library_that_only_logs(dq_, llm, full, tmp_path, monkeypatch):
    """transformers says in a log that it was given a file, and returns."""
    from transformers import PreTrainedModel

    full()
    out, original = tmp_path / "out", PreTrainedModel.save_pretrained
    monkeypatch.setattr(
        PreTrainedModel, "save_pretrained", lambda self, p, **k: None if Path(p) == out else original(self, p, **k)
    )
    status, _, err = quantize(dq_, llm, out)
    assert status == 2 and f"cannot save to {out}: nothing was written" in err
    check(found(err), out)


def test_a_corrected_model_is_kept_too(dq_, llm, full, tmp_path):
    assert quantize(dq_, llm, tmp_path / "q")[0] == 0
    (tmp_path / "text").write_text("a quick brown fox jumps over a lazy dog. " * 40)
    full(tmp_path / "out")
    learn = ("--rate", 1e-3, "--train-steps", 30, "--length", 32, "--samples", 16, "--norms", "--dtype", "fp32")
    words = ("--reference", llm, "--text", tmp_path / "text", "--out", tmp_path / "out", "--device", "cpu")
    status, text, err = dq_("correct", tmp_path / "q", *words, *learn)
    assert status == 2 and f"cannot save to {tmp_path / 'out'}" in err, text + err
    check(found(err), tmp_path / "out")


def test_the_place_is_checked_before_the_work(dq_, llm, tmp_path, monkeypatch):
    """With the bytes of all that a pipeline holds; and a model does not hide in a pipeline's folder."""
    monkeypatch.setattr("dq.pipelines.api.quantize", lambda *a, **k: pytest.fail("it was quantized"))
    demo, out = dq.demo_path(), tmp_path / "o"
    out.mkdir()
    (out / "vae").write_text("")
    status, _, err = dq_("quantize", demo, "fp8", "--out", out, "--device", "cpu")
    assert status == 2 and f"cannot write {out / 'vae'}: it is a file" in err
    (out / "vae").unlink()
    for need, room in ((14.3, 18e6), (8.1, 12e6)):  # the denoiser alone would fit
        monkeypatch.setattr("shutil.disk_usage", lambda path, room=room: SimpleNamespace(free=int(room)))
        recipe = "fp8" if need > 10 else "w4a16"
        status, _, err = dq_("quantize", demo, recipe, "--out", out, "--device", "cpu")
        taken = float(re.search(r"it takes (\d+) MB", err)[1])
        assert status == 2 and taken > room / 1e6 > need
    monkeypatch.undo()
    monkeypatch.setattr("dq.pipelines.api.quantize", lambda *a, **k: pytest.fail("it was quantized"))
    (out / "model_index.json").write_text("{}")
    status, _, err = quantize(dq_, llm, out)
    assert status == 2 and "it holds a pipeline, and a model is to be saved" in err


def test_a_full_disk_under_a_resume_folder(dq_, llm, tmp_path, monkeypatch):
    calls = []

    def save(tensors, path, **kwargs):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(FULL)
        return original(tensors, path, **kwargs)

    import dq.resume as module

    original = module.save_file
    monkeypatch.setattr(module, "save_file", save)
    words = ("quantize", llm, "int8", "--min-features", 16, "--out", tmp_path / "o", "--resume", tmp_path / "r")
    status, _, err = dq_(*words, "--device", "cpu")
    assert status == 2 and FULL in err.splitlines()[-1] and "which holds those before it" in err
    assert dq_(*words, "--device", "cpu")[0] == 0 and dq.layer_info(dq.load(tmp_path / "o"))
