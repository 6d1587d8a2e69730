"""`dq inspect` on our checkpoints, on those of other tools, and on files that are none or are damaged."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

import dq
from dq.kernels.library import as_on
from dq.linear import quantized_linears
from dq.pipelines.contents import Contents, Header
from dq.pipelines.inspection import inspect_checkpoint, sized
from dq.pipelines.kernel_choice import Machine, kernels, width
from dq.recipe import Recipe
from dq.registry import DQError


def recipe(weights, activations=None, modulation=None, **more):
    target = {"weights": weights} | ({"activations": activations} if activations else {}) | more
    entry = {"name": "mine", "description": "", "linear": target, "modulation": {"weights": modulation or weights}}
    return Recipe.from_dict(entry).with_(min_features=16)


def flux(tiny, plan, **options):
    model = tiny.flux(torch.bfloat16, num_layers=1, num_single_layers=1)
    dq.quantize(model, plan, progress=False, **options)
    return model


def only(path, **options):
    models = inspect_checkpoint(str(path), **options).models
    assert len(models) == 1
    return models[0]


def test_ours(tiny, tmp_path):
    """Residual columns and the rank are said; bits count everything that belongs to a weight."""
    transforms = [{"name": "arc", "channels": 16, "dual": True}, {"name": "lowrank", "rank": 8}]
    plan = recipe("nvfp4", "nvfp4-token", "int4/group32", transforms=transforms)
    flux(tiny, plan, calibration=[tiny.flux_inputs(torch.bfloat16)]).save_pretrained(tmp_path)
    found = only(tmp_path)
    big, modulation = (next(g for g in found.groups if g.format == f) for f in ("nvfp4", "int4/group32"))
    assert "dual residual columns 16" in big.extra and "low rank 8" in big.extra and big.activations == "nvfp4-token"
    assert (modulation.layers, modulation.activations) == (3, "16-bit")
    assert modulation.values == 2 * 384 * 64 + 192 * 64 and modulation.bits == 4.5
    assert sorted(found.kept)[:2] == ["context_embedder", "norm_out.linear"]
    assert found.kept["context_embedder"] == 64 * 32 * 2
    text = str(found)
    assert "recipe mine (dq format 1;" in text and "calibrated on 1 records" in text and "0.0 MB" not in text
    assert found.layers["transformer_blocks.0.attn.to_q"] == "nvfp4"


EXPORTS = {
    "comfyui": (recipe("int8/channel", "int8/token", transforms=["rotate"]), "int8_tensorwise (ComfyUI)", "rotate 64"),
    "modelopt": (recipe("nvfp4"), "W4A16_NVFP4 (modelopt)", ""),
    "bfl": (recipe("fp8_e4m3/channel", "fp8_e4m3/token"), "FP8 E4M3 per channel", ""),
}  # fmt: skip


@pytest.mark.parametrize("kind", EXPORTS)
def test_exports_of_diffusers_models(tiny, tmp_path, kind):
    plan, form, extra = EXPORTS[kind]
    out = dq.export(flux(tiny, plan), tmp_path / "out", kind)
    found = only(out)
    assert found.kind == "FluxTransformer2DModel" and {g.format for g in found.groups} == {form}
    assert extra in {g.extra for g in found.groups}
    assert found.groups[0].bits == pytest.approx(4.5 if kind == "modelopt" else 8.5, abs=0.2)
    file = next(out.glob("*.safetensors"))
    assert only(file).groups == found.groups


def test_nunchaku_lite(tiny, tmp_path):
    """Its two sections; a zero low-rank branch of rank 16 on every W4A4 linear counts."""
    model = tiny.flux(torch.bfloat16, num_layers=1, num_single_layers=1, num_attention_heads=4)
    dq.quantize(model, recipe("nvfp4", "nvfp4-token", "int4/group64"), progress=False)
    found = only(dq.export(model, tmp_path / "out", "nunchaku-lite"))
    forms = {g.format: g for g in found.groups}
    assert set(forms) == {"nvfp4 per group 16 (svdq_w4a4)", "int4 per group 64 (awq_w4a16)"}
    assert forms["nvfp4 per group 16 (svdq_w4a4)"].extra == "smooth, low rank 16"
    assert forms["int4 per group 64 (awq_w4a16)"].bits == 4 + 2 * 16 / 64


@pytest.mark.parametrize(
    ("weights", "activations", "form", "acts", "bits"),
    [
        ("int4/group32", None, "int4 per group 32 (pack-quantized)", "16-bit", 4.5),
        ("fp8_e4m3/channel", "fp8_e4m3/token", "float8 per channel (float-quantized)", "float8 per token", 8.25),
        ("mxfp4", "mxfp4", "float4 per group 32 (mxfp4-pack-quantized)", "float4 per group 32", 4.25),
    ],
)
def test_compressed_tensors(tiny, tmp_path, weights, activations, form, acts, bits):
    model = tiny.llama(hidden_size=128, intermediate_size=256)
    dq.quantize(model, recipe(weights, activations), progress=False)
    found = only(dq.export(model, tmp_path / "out"))
    assert found.method == "compressed-tensors" and found.kind == "LlamaForCausalLM"
    (group,) = found.groups
    assert (group.format, group.activations, group.layers) == (form, acts, 14)
    assert group.bits == pytest.approx(bits, abs=0.05)
    assert set(found.kept) == {"lm_head", "model.embed_tokens"}


def write(path, tensors, config=None, **metadata):
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors", metadata)
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


BYTES = dict(dtype=torch.uint8)
NF4 = {
    "a.weight": torch.zeros(64 * 64 // 2, 1, **BYTES), "a.weight.absmax": torch.ones(64),
    "a.weight.quant_map": torch.ones(16), "a.weight.quant_state.bitsandbytes__nf4": torch.zeros(9, **BYTES),
    "b.weight": torch.zeros(8, 8),
}  # fmt: skip
GPTQ = {
    "a.qweight": torch.zeros(64 // 8, 48, dtype=torch.int32), "a.qzeros": torch.zeros(1, 6, dtype=torch.int32),
    "a.scales": torch.ones(1, 48).half(), "a.g_idx": torch.zeros(64, dtype=torch.int32),
}  # fmt: skip
CODES = torch.zeros(8, 16).to(torch.float8_e4m3fn)
FP8 = {"a.weight": CODES, "b.weight": CODES.clone(), "b.weight_scale_inv": torch.ones(1, 1)}


def test_names_of_other_tools(tmp_path):
    """bitsandbytes, GPTQ, and FP8 with and without scales: by the names and dtypes of their tensors."""
    found = only(write(tmp_path / "nf4", NF4, {"quantization_config": {"quant_method": "bitsandbytes"}}))
    assert found.groups[0].format == "NF4 or FP4 (bitsandbytes)" and found.groups[0].values == 64 * 64
    assert "quantized by bitsandbytes" in str(found) and list(found.kept) == ["b"]
    found = only(write(tmp_path / "gptq", GPTQ, {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    assert found.groups[0].format == "GPTQ or AWQ" and found.groups[0].values == 48 * 64
    found = only(write(tmp_path / "fp8", FP8))
    assert {g.format for g in found.groups} == {"FP8 E4M3 without scales", "FP8 E4M3 per tensor"}
    strange = write(tmp_path / "x", {"x.y": torch.zeros(4)}, {"quantization_config": {"quant_method": "new"}})
    assert str(only(strange)).endswith("; quantized by new")


def test_torchao(tmp_path):
    pytest.importorskip("torchao", reason="needs torchao, see the extra interop")
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    for name, config in {"INT8": Int8WeightOnlyConfig(), "FP8 E4M3": Float8WeightOnlyConfig()}.items():
        model = torch.nn.Sequential(torch.nn.Linear(64, 32, dtype=torch.bfloat16))
        quantize_(model, config)
        tensors, metadata = flatten_tensor_state_dict(model.state_dict())
        (group,) = only(write(tmp_path / name, tensors, **metadata)).groups
        assert group.format == f"{name} (torchao)" and group.values == 32 * 64


def test_plain_sharded_and_loose_files(tiny, tmp_path):
    tiny.llama(torch.bfloat16).save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    found = only(tmp_path / "sharded")
    assert found.files > 2 and str(found).endswith("; not quantized") and set(found.tensors) == {"BF16"}
    (tmp_path / "sharded" / "config.json").unlink()
    loose = only(tmp_path / "sharded")
    assert loose.files == found.files and loose.tensors == found.tensors
    next((tmp_path / "sharded").glob("*00002-of*")).unlink()
    with pytest.raises(DQError, match=r"cannot inspect .*: \d of \d shards are there"):
        only(tmp_path / "sharded")
    two = tmp_path / "two"
    two.mkdir()
    for name in ("a", "b"):
        save_file({"x": torch.zeros(2)}, two / f"{name}.safetensors")
    assert [m.name for m in inspect_checkpoint(str(two)).models] == ["a.safetensors", "b.safetensors"]


def gguf_file(path, kind=2, cut=0):
    """Two tensors of 64 x 32: Q4_0 (type 2) of 18 bytes for 32 values, and F16; written by the specification."""
    text = lambda s: struct.pack("<Q", len(s)) + s.encode()  # noqa: E731
    pairs = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    pairs += text("some.list") + struct.pack("<IIQ", 9, 4, 3) + struct.pack("<III", 1, 2, 3)
    tensor = lambda n, k, at: text(n) + struct.pack("<IQQIQ", 2, 32, 64, k, at)  # noqa: E731
    head = (
        b"GGUF" + struct.pack("<IQQ", 3, 2, 2) + pairs + tensor("blk.0.weight", kind, 0) + tensor("out.weight", 1, 1152)
    )
    data = bytes(1152 + 64 * 32 * 2)
    path.write_bytes((head + bytes(-len(head) % 32) + data)[: -cut or None])
    return path


def test_gguf(tmp_path):
    found = only(gguf_file(tmp_path / "model.gguf"))
    assert found.kind == "GGUF of llama" and found.tensors == {"Q4_0": 1, "F16": 1}
    (group,) = found.groups
    assert (group.format, group.values, group.bits) == ("Q4_0", 64 * 32, 4.5)
    assert found.kept == {"out": 64 * 32 * 2}
    with pytest.raises(DQError, match=r"model\.gguf is truncated"):
        only(gguf_file(tmp_path / "model.gguf", cut=5))
    # A count of tensors, of metadata, the length of a name, the type of a value; the end of the header.
    for at, value in ((15, 0x7F), (20, 0x7F), (30, 0x7F), (53, 0x7F), (90, None)):
        data = gguf_file(tmp_path / "model.gguf").read_bytes()
        data = data[:at] if value is None else data[:at] + bytes([value]) + data[at + 1 :]
        (tmp_path / "model.gguf").write_bytes(data)
        with pytest.raises(DQError, match=r"model\.gguf is damaged or truncated: its header cannot be read"):
            only(tmp_path / "model.gguf")
    with pytest.raises(DQError, match=r"blk\.0\.weight has the unknown ggml type 99"):
        only(gguf_file(tmp_path / "model.gguf", kind=99))


def test_bad_files(tiny, tmp_path):
    flux(tiny, recipe("int8/channel")).save_pretrained(tmp_path / "a")
    path = tmp_path / "a" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    name = "transformer_blocks.0.attn.to_q.weight_scale"
    save_file(tensors | {name: torch.full_like(tensors[name], float("nan"))}, path)
    with pytest.raises(DQError, match=rf"cannot inspect .*a: .*{name} holds NaN or Inf"):
        only(tmp_path / "a")
    save_file({k: t for k, t in tensors.items() if not k.startswith("transformer_blocks.0.attn.to_q.")}, path)
    with pytest.raises(DQError, match=r"lacks the tensors of transformer_blocks\.0\.attn\.to_q, which its config"):
        only(tmp_path / "a")
    large = write(tmp_path / "large", {"x": torch.full((1100, 1000), float("inf"))})
    assert only(large).tensors == {"F32": 1}
    with pytest.raises(DQError, match="x holds NaN or Inf"):
        only(large, values=True)
    for name, content in {"a.safetensors": b"nonsense", "b.bin": b"", "c.gguf": b"GGML"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DQError, match="cannot inspect") as error:
            only(tmp_path / name)
        assert name in str(error.value) and "\n" not in str(error.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DQError, match="holds no model"):
        only(tmp_path / "empty")


def test_sizes_in_suitable_units():
    assert [sized(n) for n in (0, 999, 1000, 586_380, 27_180_000, 6_760_000_000)] == [
        "0 B", "999 B", "1.00 kB", "586.38 kB", "27.18 MB", "6.76 GB",
    ]  # fmt: skip


def test_json(tiny, tmp_path, capsys):
    from dq import cli

    flux(tiny, recipe("int8/channel", "int8/token")).save_pretrained(tmp_path / "a")
    assert cli.main(["inspect", str(tmp_path / "a"), "--json", "-"]) == 0
    (model,) = json.loads(capsys.readouterr().out)["models"]
    assert model["method"] == "dq" and model["layers"]["transformer_blocks.0.attn.to_q"] == "int8/channel"
    assert {g["format"] for g in model["groups"]} == {"int8/channel"} and "x_embedder" in model["kept"]
    assert model["groups"][0]["bits_per_weight"] == round(
        8 * model["groups"][0]["nbytes"] / model["groups"][0]["values"], 4
    )
    assert cli.main(["inspect", str(tmp_path / "a"), "--json", str(tmp_path / "a.json")]) == 0
    assert "int8/channel" in capsys.readouterr().out and json.loads((tmp_path / "a.json").read_text())["models"] == [
        model
    ]
    assert cli.main(["inspect", str(tmp_path / "a"), "--json", str(tmp_path / "a.txt")]) == 2


def test_kernels_are_those_that_the_loaded_model_takes(tiny, tmp_path):
    """On this machine, and as on a GPU that is not here; a width that no kernel takes has a row of its own."""
    model = tiny.flux(torch.bfloat16, num_layers=1, num_single_layers=1)
    dq.quantize(model, tiny.recipe("w4a4-nvfp4-svd"), calibration=[tiny.flux_inputs(torch.bfloat16)], progress=False)
    model.save_pretrained(tmp_path)
    loaded = quantized_linears(type(model).from_pretrained(tmp_path, torch_dtype=torch.bfloat16))
    for device, capability in (("cpu", None), ("cuda", (8, 0)), ("cuda", (9, 0)), ("cuda", (12, 0))):
        where = {"device": device} if capability is None else {"capability": "{}.{}".format(*capability)}
        found = only(tmp_path, **where)
        with as_on(capability):
            for name, layer in loaded.items():
                choice = layer.choose(torch.device(device), torch.bfloat16)
                assert found.kernels[name].startswith(f"{choice.backend.name}, activations "), name
                layer._choice = None  # which is remembered by device, not by what it is pretended to be
                group = next(g for g in found.groups if g.example == name or g.kernel == found.kernels[name])
                assert set(group.refused) == set(choice.refused)
        assert len(found.kernels) == len(loaded) == sum(g.layers for g in found.groups)
    assert "kernel block-scaled-mma, activations nvfp4-token" in str(found)
    assert "not block-scaled-mma" in only(tmp_path, capability="9.0").text(verbose=True)
    with pytest.raises(DQError, match="a compute capability is written as"):
        only(tmp_path, capability="90")
    with pytest.raises(DQError, match="not both"):
        only(tmp_path, device="cpu", capability="9.0")


@pytest.mark.parametrize("preset", ["fp8-static", "int8-smooth", "w4a16-awq", "w4a4-int4-convrot", "w4a4-nvfp4-arc"])
def test_kernels_need_no_weights(tiny, preset):
    """From shapes alone the choice is the one that a layer with its tensors makes."""
    layer, _ = tiny.layer(preset, 128, 256, dtype=torch.bfloat16)
    own = {n: Header(tuple(t.shape), "", 0) for n, t in layer.state_dict().items()}
    assert width(layer.config, own) == 256
    config = {"kinds": [layer.config.to_dict()], "layers": {"a": {"kind": 0}}}
    for capability in ((8, 0), (9, 0), (12, 0)):
        machine = Machine(torch.device("cuda"), capability)
        found = kernels(Contents({"quantization_config": config}, {"a": own}), machine)["a"]
        with as_on(capability):
            layer._choice = None
            choice = layer.choose(machine.device, machine.dtype)
        assert (found.name, found.grid) == (choice.backend.name, choice.backend.grid(layer.params))
        assert (found.in_torch, found.refused) == (choice.backend.in_torch(layer.params), choice.refused)


def test_a_width_that_is_padded(tiny):
    """40 inputs rest as two groups of 32; a factor per channel says which of them are there."""
    for transforms, k in (((), 64), (("smooth",), 40)):
        plan = recipe("int4/group32", transforms=list(transforms))
        layer, _ = tiny.layer(plan, 32, 40)
        own = {n: Header(tuple(t.shape), "", 0) for n, t in layer.state_dict().items()}
        assert width(layer.config, own) == k
    with pytest.raises(DQError, match="do not fit its config"):
        width(layer.config, own | {"weight_scale": Header((32, 3), "F16", 0)})


def test_another_kind_of_file_is_not_called_damaged(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(DQError, match=r"cannot inspect .*model\.bin: it is neither a safetensors nor a GGUF file"):
        only(tmp_path / "model.bin")
