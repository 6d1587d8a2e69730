"""What a folder holds: every kind loads, and whatever is wrong with it is one line that names the folder."""

import json

import pytest
import torch

import dq
from dq.linear import quantized_linears
from dq.pipelines.inspection import inspect_folder
from dq.pipelines.loading import copy_companions, folder_of, is_demo, is_model_folder, is_pipeline, load, load_tokenizer
from dq.recipe import Recipe


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory):
    """A quantized transformer, a text encoder, a language model and a whole pipeline in folders."""
    root = tmp_path_factory.mktemp("saved")
    model = tiny.flux(torch.bfloat16)
    dq.quantize(model, tiny.recipe("int8"), progress=False)
    model.save_pretrained(root / "flux")
    tiny.t5(torch.bfloat16).save_pretrained(root / "t5")
    tiny.llama(torch.bfloat16).save_pretrained(root / "llama")
    tiny.flux_pipeline(torch.bfloat16).save_pretrained(root / "pipe")
    return root


@pytest.fixture
def copy(saved, tmp_path):
    """copy(name): a folder that a test may damage."""
    import shutil

    return lambda name: shutil.copytree(saved / name, tmp_path / name)


def write_config(folder, text):
    (folder / "config.json").write_text(text if isinstance(text, str) else json.dumps(text))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("flux", "FluxTransformer2DModel"),
        ("t5", "T5EncoderModel"),
        ("llama", "LlamaForCausalLM"),
        ("pipe", "FluxPipeline"),
    ],
)
def test_every_kind_of_folder_loads(saved, name, kind):
    obj = load(str(saved / name), device="cpu")
    assert type(obj).__name__ == kind and is_pipeline(obj) == (name == "pipe") != is_model_folder(str(saved / name))
    assert (obj.transformer if name == "pipe" else obj).dtype == torch.bfloat16


def test_load_by_its_public_name(saved, tiny, tmp_path):
    """What dq saved, what it exported and plain folders: one verb, the same function."""
    assert type(dq.load(saved / "pipe")).__name__ == "FluxPipeline"
    assert len(quantized_linears(dq.load(saved / "flux"))) > 10
    model, ids = tiny.llama(hidden_size=128, intermediate_size=256), torch.arange(3, 20)[None]
    dq.quantize(model, tiny.recipe("w4a4-nvfp4"), progress=False)
    for kind in ("compressed-tensors", "modelopt"):
        out = dq.export(model, tmp_path / kind, kind, calibration=[dict(input_ids=ids)])
        back = dq.load(str(out), device="cpu")
        assert back.dtype == torch.float32 and len(quantized_linears(back)) == 14
        with torch.no_grad():
            assert torch.allclose(back(ids).logits, model(ids).logits, atol=1e-5)
        assert dq.load(out, torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(dq.DQError, match="no such folder"):
        dq.load("./nowhere")


@pytest.mark.parametrize("kind", ["bfl", "comfyui"])
def test_load_of_one_file_in_a_folder(tiny, tmp_path, kind):
    """The config beside it says no method: the name of the file does."""
    model = tiny.flux(torch.bfloat16, num_layers=1, num_single_layers=1)
    weights = {"bfl": "fp8_e4m3/channel", "comfyui": "int8/channel"}[kind]
    acts = weights.replace("channel", "token")
    target = {"weights": weights, "activations": acts}
    plan = Recipe.from_dict({"name": "test", "linear": target, "modulation": target}).with_(min_features=16)
    dq.quantize(model, plan, progress=False)
    back, x = dq.load(dq.export(model, tmp_path / "out", kind)), tiny.flux_inputs(torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(back(**x)[0], model(**x)[0])
    with pytest.raises(dq.DQError, match=r"out\.safetensors is another engine's file: dq.load and dq inspect read"):
        load(str(tmp_path / "out"), device="cpu")


@pytest.mark.parametrize("kind", ["modelopt", "nunchaku-lite"])
def test_load_of_an_exported_pipeline(tiny, tmp_path, kind):
    """Without the library that diffusers would ask for, and with the codes of the component alone."""
    pipe = tiny.flux_pipeline(torch.bfloat16)
    weights = {"modelopt": "nvfp4", "nunchaku-lite": "int4/group64"}[kind]
    recipe = Recipe.from_dict({"name": "test", "linear": {"weights": weights}}).with_(min_features=64)
    dq.quantize(pipe, recipe, progress=False)
    out = dq.export(pipe, tmp_path / "out", kind)
    back, alone = dq.load(out), dq.load_exported(out / "transformer")
    assert type(back) is type(pipe) and back.vae.dtype == torch.bfloat16
    here, there = (quantized_linears(m) for m in (back.transformer, alone))
    assert list(here) == list(there) == list(quantized_linears(pipe.transformer))
    assert all(torch.equal(here[n].qweight, there[n].qweight) for n in here)
    assert tiny.denoise(back).isfinite().all()
    form = f"in the form of {kind.replace('-', '_')}: dq.load"
    for folder, words in (
        (out, f"its transformer is {form}, dq inspect, dq eval and dq generate"),
        (out / "transformer", f"it is {form} and dq inspect"),
    ):
        with pytest.raises(dq.DQError, match=f"{words} read that; this takes the 16-bit one"):
            load(str(folder), device="cpu")


DAMAGE = {
    "config.json holds no JSON": lambda f: write_config(f, "{nonsense"),
    "config.json is binary": lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"),
    "config.json is a list": lambda f: write_config(f, []),
    "an unknown class": lambda f: write_config(f, {"_class_name": "NoSuchModel"}),
    "a class that is no model": lambda f: write_config(f, {"_class_name": "FlowMatchEulerDiscreteScheduler"}),
    "no class": lambda f: write_config(f, {"hidden_size": 3}),
    "weights deleted": lambda f: next(f.glob("*.safetensors")).unlink(),
    "weights truncated": lambda f: (p := next(f.glob("*.safetensors"))).write_bytes(p.read_bytes()[:-100]),
    "weights garbled": lambda f: next(f.glob("*.safetensors")).write_bytes(b"garbage" * 100),
    "weights empty": lambda f: next(f.glob("*.safetensors")).write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["flux", "llama"])
def test_damage_is_one_line_that_names_the_folder(copy, name, damage):
    folder = copy(name)
    DAMAGE[damage](folder)
    with pytest.raises(dq.DQError) as found:
        load(str(folder), device="cpu")
    assert str(folder) in str(found.value) and "\n" not in str(found.value) and len(str(found.value)) < 500


@pytest.mark.parametrize("damage", [d for d in DAMAGE if d.startswith("weights") or "holds" in d or "binary" in d])
def test_inspect_names_the_damaged_folder(copy, damage):
    folder = copy("flux")
    assert "int8" in inspect_folder(str(folder))
    DAMAGE[damage](folder)
    with pytest.raises(dq.DQError, match=r"cannot inspect .*flux: "):
        inspect_folder(str(folder))


def test_inspect_misses_nothing_of_a_pipeline(copy):
    import shutil

    folder = copy("pipe")
    assert len(inspect_folder(str(folder)).splitlines()) == 4
    next((folder / "vae").glob("*.safetensors")).unlink()
    with pytest.raises(dq.DQError, match=r"cannot inspect .*vae: it has a config\.json and no weights"):
        inspect_folder(str(folder))
    shutil.rmtree(folder / "vae")
    with pytest.raises(dq.DQError, match="names the component 'vae', whose folder is missing"):
        inspect_folder(str(folder))


def test_inspect_of_incomplete_quantization(copy, tiny):
    folder = copy("flux")
    for change in (lambda c: c.pop("kinds"), lambda c: c.update(layers={})):
        tiny.edit_config(folder, change)
        with pytest.raises(dq.DQError, match=r"has no '(kinds|layers)'"):
            inspect_folder(str(folder))


@pytest.mark.parametrize("text", ["{}", "[]", "nonsense"])
def test_an_empty_model_index_is_no_pipeline(tmp_path, text):
    (tmp_path / "model_index.json").write_text(text)
    with pytest.raises(dq.DQError, match=r"cannot load .*model_index\.json"):
        load(str(tmp_path), device="cpu")


def test_names(tmp_path):
    for name in ("", " "):
        with pytest.raises(dq.DQError, match="the source is empty"):
            folder_of(name)
    for name in ("/nope", "./nope", "../nope", "~/nope/nope", "a/b/c"):
        with pytest.raises(dq.DQError, match="no such folder"):
            folder_of(name)
    (tmp_path / "file").write_text("")
    with pytest.raises(dq.DQError, match="is a file"):
        folder_of(str(tmp_path / "file"))
    assert folder_of(str(tmp_path)) == tmp_path and folder_of("owner/name") is None
    with pytest.raises(dq.DQError, match="neither model_index"):
        load(str(tmp_path), device="cpu")
    with pytest.raises(
        dq.DQError, match=r"no local folder, the hub cannot be reached \(.*\), and its cache has no copy"
    ):
        load("no-such-owner/no-such-model", device="cpu")


HUB = {
    "a pipeline": (["model_index.json", "unet/config.json"], "cannot load a/b from the hub"),
    "a model": (["config.json"], "cannot load a/b from the hub"),
    "neither": (["README.md"], "holds neither model_index.json nor config.json"),
    "no repository": (None, "no repository of that name"),
}


@pytest.mark.parametrize("case", HUB)
def test_what_the_hub_says(monkeypatch, case):
    """Asked once, with the answers of a hub that is not here."""
    from types import SimpleNamespace

    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    from dq.pipelines import hub

    files, message = HUB[case]
    asked = []

    def model_info(self, source, timeout):
        asked.append(source)
        if files is None:
            raise RepositoryNotFoundError.__new__(RepositoryNotFoundError)  # its arguments differ among versions
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=f) for f in files])

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    hub.find.cache_clear()
    with pytest.raises(dq.DQError, match=message):
        load("a/b", device="cpu")
    assert asked == ["a/b"]
    hub.find.cache_clear()


@pytest.mark.parametrize("device", ["foo", "cpu:x", "cuda:99"])
def test_devices(saved, device):
    with pytest.raises(dq.DQError, match=f"device '{device}' cannot be used here"):
        load(str(saved / "flux"), device=device)


def test_the_demo_is_recognised_by_its_origin(copy, tiny):
    assert is_demo(dq.demo_path()) and is_demo(dq.demo_path() + "/")
    folder = copy("pipe")
    assert not is_demo(str(folder)) and not is_demo("owner/name")
    config = json.loads((folder / "transformer" / "config.json").read_text())
    for source, demo in ((f"{dq.demo_path()}/transformer", True), ("/far/pipelines/demo/weights/transformer", True),
                         ("/models/flux/transformer", False), (None, False)):  # fmt: skip
        write_config(folder / "transformer", config | {"quantization_config": {"source": source}})
        assert is_demo(str(folder)) == demo


def test_tokenizers_travel(saved, tmp_path, tiny, copy):
    with pytest.raises(dq.DQError, match="llama has no tokenizer"):
        load_tokenizer(str(saved / "llama"))
    folder, out = copy("llama"), tmp_path / "out"
    tiny.t5_tokenizer().save_pretrained(folder)
    out.mkdir()
    assert "tokenizer.json" in copy_companions(str(folder), str(out))
    assert load_tokenizer(str(out))("a cat").input_ids == load_tokenizer(str(folder))("a cat").input_ids
    assert not list(out.glob("*.safetensors")) and not (out / "config.json").exists()
