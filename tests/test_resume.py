"""The resume folder: an interrupted run continues with the same bits, and never with foreign blocks."""

import pytest
import torch
from tqdm import tqdm

import dq.loop
from dq.linear import quantized_linears
from dq.loop import quantize_model
from dq.planning import make_plan
from dq.records import Record
from dq.registry import DQError
from dq.resume import ResumeFolder


def quiet(*args, **kwargs):
    return tqdm(*args, **kwargs, disable=True)


def interrupting(after):
    """A progress bar whose user presses Ctrl-C at the given step."""

    class Bar:
        def __init__(self, **kwargs):
            self.n = 0

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return False

        def update(self, n):
            self.n += n
            if self.n >= after:
                raise KeyboardInterrupt

    return Bar


def state(model):
    return {k: (v.dtype, v.contiguous().view(torch.uint8).clone()) for k, v in model.state_dict().items()}


def same_state(a, b):
    return a.keys() == b.keys() and all(a[k][0] == b[k][0] and torch.equal(a[k][1], b[k][1]) for k in a)


@pytest.fixture
def work(tiny, monkeypatch):
    """quantize(model, recipe name, ...) on records of the tiny FLUX.1; counts the rows that are really computed."""
    records = [Record((), tiny.flux_inputs(torch.bfloat16, seed=s), prompt=s, step=s, steps=2) for s in (0, 1)]
    done, original = [], dq.loop.quantize_row

    def spy(model, row, stats, device=None):
        done.append(row.members[0])
        return original(model, row, stats, device)

    monkeypatch.setattr(dq.loop, "quantize_row", spy)

    def quantize(model, name, calibrated=True, **kwargs):
        done.clear()
        kwargs.setdefault("progress", quiet)
        return quantize_model(model, make_plan(model, tiny.recipe(name)), records if calibrated else (), **kwargs)

    quantize.rows = done
    return quantize


@pytest.mark.parametrize("prefix", ["fp", "quantized", "linears"])
@pytest.mark.parametrize("name", ["w4a4-nvfp4-svd", "int8-smooth", "w4a4-nvfp4"])
def test_same_bits_after_an_interruption(work, tiny, tmp_path, name, prefix):
    whole = tiny.flux(torch.bfloat16)
    report = work(whole, name, prefix=prefix)
    everything, steps = list(work.rows), 40 if prefix == "linears" else 20
    model = tiny.flux(torch.bfloat16)
    before = state(model)
    with pytest.raises(KeyboardInterrupt):
        work(model, name, prefix=prefix, resume=str(tmp_path / "r"), progress=interrupting(steps))
    assert same_state(state(model), before) and not quantized_linears(model), "an interrupted model must be untouched"
    finished = {f.stem for f in (tmp_path / "r").glob("*.safetensors")}
    assert 0 < len(finished) < 4
    resumed = work(model, name, prefix=prefix, resume=str(tmp_path / "r"))
    assert same_state(state(model), state(whole))
    # Only what was missing was computed, and the report is that of an uninterrupted run.
    block_of = make_plan(tiny.flux(), tiny.recipe(name)).family.block_of
    assert work.rows == [n for n in everything if block_of(n) not in finished]
    assert [(x.name, x.sqnr_db) for x in resumed.layers] == [(x.name, x.sqnr_db) for x in report.layers]
    assert resumed.plan.remarks == report.plan.remarks
    assert {n: x.config for n, x in quantized_linears(model).items()} == {
        n: x.config for n, x in quantized_linears(whole).items()
    }


def test_data_free(work, tiny, tmp_path):
    whole, model = tiny.flux(torch.bfloat16), tiny.flux(torch.bfloat16)
    work(whole, "w4a4-int4-convrot", calibrated=False)
    with pytest.raises(KeyboardInterrupt):
        work(model, "w4a4-int4-convrot", calibrated=False, resume=str(tmp_path), progress=interrupting(12))
    work(model, "w4a4-int4-convrot", calibrated=False, resume=str(tmp_path))
    assert work.rows and same_state(state(model), state(whole))


def test_a_finished_folder_gives_all_of_it(work, tiny, tmp_path):
    one, two = tiny.flux(torch.bfloat16), tiny.flux(torch.bfloat16)
    work(one, "int8-smooth", resume=str(tmp_path))
    work(two, "int8-smooth", resume=str(tmp_path))
    assert work.rows == [] and same_state(state(one), state(two))
    assert all(not layer.training for layer in quantized_linears(two).values())


def test_half_written_files_do_not_count(work, tiny, tmp_path):
    """A block's file appears whole or not at all; what a crash left behind beside it is ignored."""
    whole, model = tiny.flux(torch.bfloat16), tiny.flux(torch.bfloat16)
    work(whole, "fp8", resume=str(tmp_path))
    for name in ("transformer_blocks.0", "single_transformer_blocks.1"):
        file = tmp_path / f"{name}.safetensors"
        file.with_suffix(".part").write_bytes(file.read_bytes()[:100])
        file.unlink()
    work(model, "fp8", resume=str(tmp_path))
    assert same_state(state(model), state(whole))
    assert {n.rpartition(".attn")[0] for n in work.rows if "attn.to_q" in n} == {
        "transformer_blocks.0",
        "single_transformer_blocks.1",
    }


@pytest.mark.parametrize("change", ["recipe", "weights", "calibration", "prefix"])
def test_foreign_folders_are_refused(work, tiny, tmp_path, change):
    work(tiny.flux(torch.bfloat16), "int8-smooth", resume=str(tmp_path), calibration={"sha256": "a"})
    model = tiny.flux(torch.bfloat16, seed=1 if change == "weights" else 0)
    before = state(model)
    kwargs = {"calibration": {"sha256": "b" if change == "calibration" else "a"}}
    kwargs["prefix"] = "quantized" if change == "prefix" else "fp"
    names = {"weights": "model", "prefix": "calibration", "recipe": "recipe and choice of linears"}
    other = names.get(change, change)
    with pytest.raises(DQError, match=f"holds blocks of another {other}; continue with the same, .*an empty folder"):
        work(model, "int8" if change == "recipe" else "int8-smooth", resume=str(tmp_path), **kwargs)
    assert same_state(state(model), before) and work.rows == []
    kwargs["prefix"] = "fp"
    work(tiny.flux(torch.bfloat16), "int8-smooth", resume=str(tmp_path), calibration={"sha256": "a"})
    assert work.rows == [], "the refusal must not have spoiled the folder"


def test_marks_of_other_versions_are_refused(work, tiny, tmp_path):
    for mark in (b"0" * 64, b"[1]", b"{}"):
        (tmp_path / "fingerprint").write_bytes(mark)
        with pytest.raises(DQError, match="holds blocks of another"):
            work(tiny.flux(torch.bfloat16), "fp8", calibrated=False, resume=str(tmp_path))


def test_folder_keeps_layers_exactly(work, tiny, tmp_path):
    model = tiny.flux(torch.bfloat16)
    work(model, "w4a4-nvfp4-svd", resume=str(tmp_path))
    plan = make_plan(tiny.flux(torch.bfloat16), tiny.recipe("w4a4-nvfp4-svd"))
    folder = ResumeFolder(str(tmp_path), tiny.flux(torch.bfloat16), plan, {"prefix": "fp"})
    for block in plan.blocks():
        for name, layer in folder.load(block)[0].items():
            real = model.get_submodule(name)
            assert layer.config == real.config and layer.compute_dtype == real.compute_dtype
            assert layer.sqnr_db == real.sqnr_db and same_state(state(layer), state(real))
    assert folder.load("transformer_blocks.7") is None


def edits():
    """Changes of a model that a sum of squares, or a look at the quantized weights alone, would miss."""

    def negate(m):
        m.transformer_blocks[0].attn.to_q.weight.mul_(-1)

    def flip(m):
        weight = m.transformer_blocks[0].attn.to_q.weight
        weight.copy_(weight.flip(0))

    def bias(m):
        m.transformer_blocks[0].attn.to_q.bias.add_(3)

    def embedder(m):
        m.x_embedder.weight.mul_(3)

    return [negate, flip, bias, embedder]


@pytest.mark.parametrize("edit", edits(), ids=lambda e: e.__name__)
def test_any_other_byte_of_the_model_is_another_model(work, tiny, tmp_path, edit):
    work(tiny.flux(torch.bfloat16), "fp8", calibrated=False, resume=str(tmp_path))
    model = tiny.flux(torch.bfloat16)
    with torch.no_grad():
        edit(model)
    with pytest.raises(DQError, match="holds blocks of another model;"):
        work(model, "fp8", calibrated=False, resume=str(tmp_path))
    assert not quantized_linears(model)


@pytest.mark.parametrize("damage", ["empty", "cut", "noise"])
def test_damaged_blocks_are_computed_again(work, tiny, tmp_path, damage):
    whole, model = tiny.flux(torch.bfloat16), tiny.flux(torch.bfloat16)
    work(whole, "fp8", calibrated=False, resume=str(tmp_path))
    file = tmp_path / "transformer_blocks.1.safetensors"
    data = file.read_bytes()
    file.write_bytes({"empty": b"", "cut": data[: len(data) // 2], "noise": bytes(range(256)) * 40}[damage])
    work(model, "fp8", calibrated=False, resume=str(tmp_path))
    assert work.rows and all("transformer_blocks.1." in name for name in work.rows)
    assert same_state(state(model), state(whole))


def test_folders_that_cannot_be_written(work, tiny, tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    for path in (file, file / "below", "/proc/none/at/all"):
        model = tiny.flux(torch.bfloat16)
        with pytest.raises(DQError, match="resume needs a folder that can be written to"):
            work(model, "fp8", calibrated=False, resume=str(path))
        assert not quantized_linears(model)
