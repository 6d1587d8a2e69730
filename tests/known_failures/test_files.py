"""Failures of saved models that users of other tools reported: sizes, missing and foreign tensors, ties, versions."""

import copy
import json
import shutil

import pytest
import torch
from diffusers import ConfigMixin, FluxTransformer2DModel, ModelMixin
from diffusers.configuration_utils import register_to_config
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaForCausalLM, PretrainedConfig, PreTrainedModel, T5EncoderModel, T5ForConditionalGeneration

import dq
from dq.linear import quantized_linears
from dq.recipe import Rule, presets

PRESETS = presets(decoders=False)
IDS = torch.tensor([[5, 9, 77, 3, 21], [1, 2, 3, 4, 5]])


def quantize_lm(tiny, model, preset, **changes):
    recipe = tiny.recipe(preset, **changes)
    records = [dict(input_ids=IDS)] if recipe.needs_calibration else None
    return dq.quantize(model, recipe, calibration=records, progress=False)


@pytest.fixture(scope="session")
def saved(tiny, quantized_flux, tmp_path_factory):
    """(preset, library, shard size) -> (class, folder of a quantized model, names of its quantized linears)."""
    made = {}

    def make(preset, library, shard="1GB"):
        key = (preset, library, shard)
        if key not in made:
            folder = tmp_path_factory.mktemp("saved")
            if library == "diffusers":
                cls, model = FluxTransformer2DModel, copy.deepcopy(quantized_flux(preset).model)
            else:
                cls, model = LlamaForCausalLM, tiny.llama()
                quantize_lm(tiny, model, preset)
            model.save_pretrained(folder, max_shard_size=shard)
            made[key] = (cls, folder, list(quantized_linears(model)))
        return made[key]

    return make


@pytest.mark.parametrize("library", ["diffusers", "transformers"])
@pytest.mark.parametrize("preset", PRESETS)
def test_F18_bytes_on_disk_are_those_of_the_codes(tiny, saved, preset, library):
    """Seen elsewhere: a "quantized" model was saved at BF16 size."""
    _, folder, names = saved(preset, library)
    tensors = {}
    tiny.edit(folder, tensors.update)
    target = tiny.recipe(preset).linear
    for name in names:
        codes = tensors[f"{name}.qweight"]
        assert codes.dtype in (torch.int8, torch.uint8, torch.float8_e4m3fn)
        assert f"{name}.weight" not in tensors
    parts = {k: sum(tensors[f"{n}.{k}"].nbytes for n in names) for k in ("qweight", "weight_scale")}
    elements = sum(tensors[f"{n}.qweight"].numel() * (2 if target.weights.fmt.bits == 4 else 1) for n in names)
    assert parts["qweight"] <= elements * target.weights.fmt.bits / 8 * 1.35  # modulation may take 8 bits
    rest = sum(t.nbytes for k, t in tensors.items() if k.rpartition(".")[0] not in names)
    everything = sum(t.nbytes for t in tensors.values())
    disk = sum(p.stat().st_size for p in tiny.weight_files(folder))
    header = sum(int.from_bytes(p.read_bytes()[:8], "little") + 8 for p in tiny.weight_files(folder))
    assert disk - header == everything > rest


@pytest.mark.parametrize("library", ["diffusers", "transformers"])
@pytest.mark.parametrize("preset", PRESETS)
def test_F52_F62_missing_and_foreign_tensors_are_refused(tiny, saved, tmp_path, preset, library):
    """Seen elsewhere: a missing input scale gave wrong images without an error; so would any other tensor."""
    cls, folder, names = saved(preset, library)
    tensors: dict = {}
    tiny.edit(folder, tensors.update)
    own = {k.rpartition(".")[2]: k for k in tensors if k.rpartition(".")[0] in names}  # one of each kind
    other = [k for k in tensors if k.rpartition(".")[0] not in names]
    assert {"qweight", "weight_scale"} <= set(own)
    for gone in [*own.values(), other[0], other[-1]]:
        broken = shutil.copytree(folder, tmp_path / "broken")
        tiny.edit(broken, lambda t, gone=gone: t.pop(gone, None))
        with pytest.raises(dq.DQError, match=f"lacks 1 tensors, e.g. {gone}"):
            cls.from_pretrained(broken)
        shutil.rmtree(broken)
    foreign = "input_zero_point" if "input_scale" in own else "input_scale"
    for extra in (f"{names[0]}.weight", f"{names[0]}.{foreign}", "somewhere.else.weight"):
        broken = shutil.copytree(folder, tmp_path / "broken")
        tiny.edit(broken, lambda t, extra=extra: t.update({extra: torch.ones(2)}))
        with pytest.raises(dq.DQError, match=f"holds 1 unexpected tensors, e.g. {extra}"):
            cls.from_pretrained(broken)
        shutil.rmtree(broken)


@pytest.mark.parametrize("library", ["diffusers", "transformers"])
def test_F52_shards_and_shapes(tiny, saved, tmp_path, library):
    """The same in sharded checkpoints, also where the index still lists the tensor; and tensors of another shape."""
    cls, folder, names = saved("w4a16", library, "40KB")
    assert len(tiny.weight_files(folder)) > 2
    gone = f"{names[3]}.weight_scale"
    for index in (True, False):
        broken = shutil.copytree(folder, tmp_path / f"broken{index}")
        tiny.edit(broken, lambda t: t.pop(gone, None), index=index)
        with pytest.raises(dq.DQError, match=rf"lacks .*{gone}"):
            cls.from_pretrained(broken)
    broken = shutil.copytree(folder, tmp_path / "shape")
    tiny.edit(broken, lambda t: t.update({gone: t[gone][:, :-1].contiguous()}) if gone in t and t[gone].shape[1] > 1
              else t.update({gone: t[gone][:-1].contiguous()}) if gone in t else None)  # fmt: skip
    for ignore in (False, True):
        with pytest.raises(dq.DQError, match=rf"holds {gone} as F16 \(.*\), expected F16 \("):
            cls.from_pretrained(broken, ignore_mismatched_sizes=ignore)
    broken = shutil.copytree(folder, tmp_path / "dtype")
    tiny.edit(broken, lambda t: t.update({gone: t[gone].bfloat16()}) if gone in t else None)
    with pytest.raises(dq.DQError, match=rf"holds {gone} as BF16 .*, expected F16"):
        cls.from_pretrained(broken)


@pytest.mark.parametrize("preset", PRESETS)
def test_F55_tied_embeddings_stay_tied(tiny, tmp_path, preset):
    """Seen elsewhere: quantizing one side of a tie untied it, or the reloaded model lacked it."""
    everything = (Rule("lm_head", tiny.recipe(preset).linear),)  # even a recipe that asks for the head
    model = tiny.llama(tied=True)
    report = quantize_lm(tiny, model, preset, rules=everything)
    reasons = {m: r.reason for r in report.plan.rows if r.target is None for m in r.members}
    assert reasons["lm_head"] == "tied to model.embed_tokens"
    check_tied(model, LlamaForCausalLM, tmp_path / "llama", lambda m: (m.lm_head, m.model.embed_tokens))

    encoder = tiny.t5()
    quantize_lm(tiny, encoder, preset)
    check_tied(encoder, T5EncoderModel, tmp_path / "t5", lambda m: (m.shared, m.encoder.embed_tokens))


def check_tied(model, cls, folder, sides):
    model.eval().save_pretrained(folder)
    loaded = cls.from_pretrained(folder)
    for m in (model, loaded, copy.deepcopy(loaded)):
        first, second = sides(m)
        assert first.weight is second.weight
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=IDS)[0], model(input_ids=IDS)[0])
    assert len(quantized_linears(loaded)) == len(quantized_linears(model)) > 0


def test_F55_encoder_decoder(tiny, tmp_path):
    """Three names for one matrix: shared, encoder and decoder embeddings; the head is tied to them."""
    model = tiny.seeded(lambda: T5ForConditionalGeneration(tiny.t5_config(tie_word_embeddings=True)))
    labels = dict(input_ids=IDS, decoder_input_ids=IDS)
    rules = (Rule("lm_head", tiny.recipe("int8").linear),)
    dq.quantize(model, tiny.recipe("int8", rules=rules), progress=False)
    assert type(model.lm_head) is nn.Linear
    model.save_pretrained(tmp_path)
    loaded = T5ForConditionalGeneration.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(**labels).logits, model(**labels).logits)
    assert loaded.shared.weight is loaded.encoder.embed_tokens.weight is loaded.decoder.embed_tokens.weight


def test_F55_two_linears_with_one_weight(tiny):
    """The whole kind: a weight, or a whole module, under two names is not quantized under one of them."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.free = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
            self.b.weight = self.a.weight
            self.first = self.second = nn.Linear(32, 32)

    model = Tied()
    before = sum(p.numel() * 2 for p in model.parameters())
    plan = dq.plan(model, tiny.recipe("int8"))
    assert {m: r.reason for r in plan.rows for m in r.members} == {
        "a": "tied to b", "b": "tied to a", "free": "", "first": "tied to second",
    }  # fmt: skip
    assert plan.bytes_before == before  # a tied weight counts once
    report = dq.quantize(model, tiny.recipe("int8"), progress=False)
    assert list(quantized_linears(model)) == ["free"]
    assert model.a.weight is model.b.weight and model.first is model.second
    assert report.bytes_before == before and report.bytes_after == report.plan.bytes_after


class Toy(ModelMixin, ConfigMixin):
    """A diffusers model small enough to write its checkpoint by hand."""

    @register_to_config
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 3), nn.Linear(3, 2, bias=False)

    def forward(self, x):
        return self.down(self.up(x))


class ToyConfig(PretrainedConfig):
    """Its transformers twin's configuration."""

    model_type = "dq_toy"


class ToyPretrained(PreTrainedModel):
    """The same for transformers."""

    config_class = ToyConfig
    forward = Toy.forward

    def __init__(self, config):
        super().__init__(config)
        self.up, self.down = nn.Linear(4, 3), nn.Linear(3, 2, bias=False)
        self.post_init()


# Format version 1, as it is on disk for ever: readers of all later versions must read it.
VERSION_1 = {
    "quant_method": "dq",
    "format_version": 1,
    "recipe": {"name": "by hand"},
    "kinds": [
        {"weights": {"format": "int4", "strategy": "group", "group_size": 2, "scale_format": "fp16"}},
        {
            "weights": {"format": "int8", "strategy": "channel"},
            "activations": {"format": "int8", "strategy": "token", "dynamic": True},
            "steps": [["smooth", {}]],
            "rank": 1,
        },
    ],
    "layers": {"up": {"kind": 0, "sqnr_db": 21.5}, "down": {"kind": 1}},
}
TENSORS_1 = {
    # int4 pairs: 0x71 holds 1 then 7, 0x9F holds -1 then -7
    "up.qweight": torch.tensor([[0x71, 0x9F], [0x00, 0x12], [0xEE, 0x07]], dtype=torch.uint8),
    "up.weight_scale": torch.tensor([[0.5, 1.0], [2.0, 0.25], [1.0, 3.0]], dtype=torch.float16),
    "up.bias": torch.tensor([1.0, -1.0, 0.5]),
    "down.qweight": torch.tensor([[127, -64, 1], [0, 3, -127]], dtype=torch.int8),
    "down.weight_scale": torch.tensor([[0.5], [0.25]]),
    "down.smooth_factor": torch.tensor([1.0, 2.0, 4.0]),
    "down.lowrank_down": torch.tensor([[1.0, 0.0, -1.0]], dtype=torch.bfloat16),
    "down.lowrank_up": torch.tensor([[2.0], [0.5]], dtype=torch.bfloat16),
}
UP = torch.tensor([[0.5, 3.5, -1.0, -7.0], [0.0, 0.0, 0.5, 0.25], [-2.0, -2.0, 21.0, 0.0]])
DOWN = torch.tensor([[63.5 + 2.0, -16.0, 0.125 - 2.0], [0.5, 0.375, -7.9375 - 0.5]])


def write_version_1(folder, library, **changes):
    name, file = ("Toy", "diffusion_pytorch_model") if library == "diffusers" else ("ToyPretrained", "model")
    config = {"quantization_config": VERSION_1 | changes}
    config |= {"_class_name": name} if library == "diffusers" else {"architectures": [name], "model_type": "dq_toy"}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(TENSORS_1, folder / f"{file}.safetensors", metadata={"format": "pt"})
    return Toy if library == "diffusers" else ToyPretrained


@pytest.mark.parametrize("library", ["diffusers", "transformers"])
def test_F65_format_version_1_written_by_hand_loads(tmp_path, library):
    """Seen elsewhere: a loader met a checkpoint of an older release and called its code with a wrong signature."""
    dtype = {"dtype": torch.float32}
    model = write_version_1(tmp_path, library).from_pretrained(tmp_path, **dtype)
    assert torch.equal(model.up.dequantized_weight(torch.float32), UP)
    assert torch.allclose(model.down.dequantized_weight(torch.float32), DOWN, atol=1e-6)
    assert model.up.sqnr_db == 21.5
    for name, tensor in TENSORS_1.items():
        assert torch.equal(model.state_dict()[name], tensor) and model.state_dict()[name].dtype == tensor.dtype
    x = torch.tensor([[1.0, 2.0, -1.0, 0.5]])
    assert torch.allclose(model.up(x), x @ UP.T + TENSORS_1["up.bias"], atol=1e-5)
    y = model.up(x).detach()
    assert torch.allclose(model.down(y), y @ DOWN.T, atol=0.02 * float((y @ DOWN.T).abs().max()))


@pytest.mark.parametrize("library", ["diffusers", "transformers"])
def test_F66_newer_or_foreign_formats_are_refused(tmp_path, library):
    """Seen elsewhere: an older version read a newer file and gave garbage without an error."""
    cases = [
        (dict(format_version=2), r"format version 2, this dq reads up to 1: upgrade with pip install -U dq-quant"),
        (dict(format_version=None), "no format_version"),
        (dict(format_version="1"), "no format_version"),
        (dict(layers={"upp": {"kind": 0}}), "quantizes 'upp', which Toy.* lacks; did you mean 'up'"),
        (dict(kinds=[{"weights": {"format": "fp3"}}] * 2), "unknown format 'fp3'"),
        (dict(kinds=[{"weights": {"format": "int8", "strategy": "channel", "z": 1}}] * 2), "unknown QuantSpec field"),
        (dict(kinds=VERSION_1["kinds"][:1] + [VERSION_1["kinds"][1] | {"steps": [["twist", {}]]}]),
         "unknown transform 'twist'"),
        (dict(kinds=VERSION_1["kinds"][:1] + [VERSION_1["kinds"][1] | {"offsets": 1}]), "unknown .*'offsets'"),
        (dict(kinds=VERSION_1["kinds"][:1]), "kind 1"),
    ]  # fmt: skip
    for changes, message in cases:
        cls = write_version_1(tmp_path, library, **changes)
        with pytest.raises(dq.DQError, match=message):
            cls.from_pretrained(tmp_path)


def test_F66_the_writer_writes_this_version(tiny, tmp_path):
    """What is written says format version 1, and its words are those of the hand-written example."""
    model = tiny.llama()
    quantize_lm(tiny, model, "w4a4-int4-svd")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["format_version"] == 1 and config["quant_method"] == "dq"
    assert set(VERSION_1) <= set(config)
    known = {"weights", "activations", "steps", "rank", "side_dtype"}
    assert all(set(kind) <= known for kind in config["kinds"])
