"""Exported checkpoints as other tools read them: the weights that they make of them are ours.

compressed-tensors makes every scale in the dtype of the model: in float32 the weights are equal bit for bit, in
bfloat16 those whose scales were chosen in bfloat16 are, the others lose bits there. Its FP4 and MX weights are bfloat16
whatever the model is: those are equal there. It patches `forward` and quantizes activations by its own conventions:
logits are compared where those are followed too.
"""

import json

import pytest
import torch

import dq
from dq.linear import quantized_linears
from dq.recipe import Recipe, Rule

IDS = torch.randint(3, 128, (2, 16), generator=torch.Generator().manual_seed(0))
RECORDS = [dict(input_ids=IDS)]


def recipe(weights: str, activations: str | None = None) -> Recipe:
    target = {"weights": weights} | ({"activations": activations} if activations else {})
    return Recipe.from_dict({"name": "test", "description": "", "linear": target, "modulation": {"weights": weights}})


def quantized(tiny, plan: Recipe, dtype: torch.dtype = torch.float32, build=None, **changes):
    model = build(dtype) if build else tiny.llama(dtype, hidden_size=128, intermediate_size=256, **changes)
    dq.quantize(model, plan.with_(min_features=16), progress=False)
    return model


def qwen(tiny):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=128, max_position_embeddings=64, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    return lambda dtype: tiny.seeded(lambda: Qwen3ForCausalLM(config), dtype=dtype)


def decompressed(folder, dtype: torch.dtype):
    """The model as transformers loads it, its weights after the first forward decompressed them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    try:
        with torch.no_grad():
            model(IDS)
    except RuntimeError as error:  # FP4 in a float32 model: its weights are bfloat16, its inputs are not
        assert "same dtype" in str(error)
    return model


EXACT_IN_FLOAT32 = [
    ("fp8_e4m3/channel", "fp8_e4m3/token"), ("fp8_e4m3/channel", None), ("fp8_e4m3/tensor", None),
    ("fp8-block", "fp8-block-token"), ("int8/channel", "int8/token"), ("int8/channel", None), ("int4/group32", None),
    ("int4/group64", None), ("int4_full/channel", None), ("int4/group64", "int8/token"), ("int3/group32", None),
]  # fmt: skip
EXACT_IN_BFLOAT16 = [
    ("nvfp4", None), ("nvfp4@sweep", None), ("nvfp4", "nvfp4-token"), ("mxfp4", None), ("mxfp4", "mxfp4"),
    ("mxfp8", None), ("fp8_e4m3/channel/bf16", "fp8_e4m3/token"), ("int8/channel/bf16", "int8/token"),
    ("int4/group32/bf16", None),
]  # fmt: skip
CASES = [(torch.float32, *g) for g in EXACT_IN_FLOAT32] + [(torch.bfloat16, *g) for g in EXACT_IN_BFLOAT16]


@pytest.mark.parametrize(("dtype", "weights", "activations"), CASES)
def test_compressed_tensors_in_transformers(tiny, tmp_path, dtype, weights, activations):
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors, see the extra interop")
    model = quantized(tiny, recipe(weights, activations), dtype)
    dq.export(model, tmp_path / "out", calibration=RECORDS)
    loaded = decompressed(tmp_path / "out", dtype)
    for name, layer in quantized_linears(model).items():
        theirs = loaded.get_submodule(name)
        assert theirs.quantization_scheme.weights.num_bits == layer.config.weights.fmt.bits
        assert (theirs.quantization_scheme.input_activations is None) == (activations is None)
        assert torch.equal(theirs.weight, layer.dequantized_weight(dtype)), name
    assert not hasattr(loaded.lm_head, "quantization_scheme")
    assert torch.equal(loaded.model.norm.weight, model.model.norm.weight)


@pytest.mark.parametrize(("weights", "activations"), EXACT_IN_FLOAT32)
def test_compressed_tensors_in_bfloat16(tiny, tmp_path, weights, activations):
    """Scales rounded to 8 bits, then the product: two roundings of 2^-8 each."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors, see the extra interop")
    model = quantized(tiny, recipe(weights, activations), torch.bfloat16)
    dq.export(model, tmp_path / "out")
    loaded = decompressed(tmp_path / "out", torch.bfloat16)
    for name, layer in quantized_linears(model).items():
        exact = layer.dequantized_weight(torch.float32)
        assert torch.allclose(loaded.get_submodule(name).weight.float(), exact, rtol=2.0**-7, atol=0)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_loaded_model_is_ours(tiny, tmp_path, family):
    """The logits of a weight-only checkpoint, tied head included, and of a mixed one."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors, see the extra interop")
    mixed = recipe("int4/group32").with_(rules=(Rule("down_proj", recipe("int8/channel").linear),))
    build = qwen(tiny) if family == "qwen3" else None
    model = quantized(tiny, mixed, build=build, **({} if build else {"tied": True}))
    dq.export(model, tmp_path / "out")
    loaded = decompressed(tmp_path / "out", torch.float32)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    plain = build(torch.float32) if build else tiny.llama(hidden_size=128, intermediate_size=256, tied=True)
    with torch.no_grad():
        plain.load_state_dict({n: loaded.state_dict()[n] for n in plain.state_dict()})
        assert torch.allclose(plain(IDS).logits, model(IDS).logits, atol=1e-5)


@pytest.mark.parametrize("spec", ["uint4/group64", "uint4/channel", "uint8/channel", "uint3/group32", "uint2/group32"])
def test_zero_points_by_their_decompressor(tiny, tmp_path, spec):
    """transformers refuses such files, its own ones too; what compressed-tensors makes of the tensors is ours."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors, see the extra interop")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file

    model = quantized(tiny, recipe(spec))
    with pytest.warns(UserWarning, match="refuses its own files with zero points"):
        dq.export(model, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    config = QuantizationConfig(**json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"])
    scheme = config.config_groups["group_0"]
    assert not scheme.weights.symmetric
    for name, layer in quantized_linears(model).items():
        own = {k: stored[f"{name}.{k}"] for k in ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")}
        theirs = BaseCompressor.get_value_from_registry("pack-quantized").decompress(own, scheme)["weight"]
        exact = layer.dequantized_weight(torch.float64)
        assert torch.allclose(theirs.double(), exact, rtol=2.0**-11, atol=0)  # groups have float16 scales, and products
        assert layer.qtensor.zero_point.unique().numel() > 1


@pytest.mark.parametrize(
    ("dtype", "weights", "activations"),
    [
        (torch.float32, "fp8_e4m3/channel", "fp8_e4m3/token"),
        (torch.float32, "fp8_e4m3/channel", "fp8_e4m3/tensor"),
        (torch.float32, "fp8-block", "fp8-block-token"),
        (torch.float32, "int8/channel", "int8_full/token"),  # amax / 127.5, where `int8` and vLLM's kernels take 127
        (torch.bfloat16, "mxfp4", "mxfp4@even"),  # the maximum is rounded before its exponent is read
    ],
)
def test_logits_of_quantized_activations(tiny, tmp_path, dtype, weights, activations):
    """With the rule that compressed-tensors has for activations, its logits are ours."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors, see the extra interop")
    model = tiny.llama(dtype, hidden_size=128, intermediate_size=256)
    plan, static = recipe(weights, activations).with_(min_features=16), activations.endswith("tensor")
    dq.quantize(model, plan, calibration=RECORDS if static else None, progress=False)
    dq.export(model, tmp_path / "out")
    loaded = decompressed(tmp_path / "out", dtype)
    with torch.no_grad():
        ours, theirs = model(IDS).logits, loaded(IDS).logits
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-4


def by_their_rule(x: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
    """NVFP4 activations as compressed-tensors rounds them: amax/6 of a block in the dtype of x, times a second level
    that is stored (2688 / amax of the calibration), in E4M3; the step is that divided by the level, in float32."""
    blocks = x.unflatten(-1, (-1, 16))
    scale = ((blocks.abs().amax(-1, keepdim=True) / 6).float() * level).clamp(max=448).to(torch.float8_e4m3fn).float()
    step = torch.where(scale > 0, scale, 0.125) / level
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    size = (blocks.float() / step).abs().clamp(max=6)
    upper = torch.bucketize(size, values).clamp(min=1)
    low, high = values[upper - 1], values[upper]
    even = (upper - 1) % 2 == 0  # ties go to the even code
    down = (size - low < high - size) | ((size - low == high - size) & even)
    return (torch.where(down, low, high) * blocks.float().sign() * step).flatten(-2).to(x.dtype)


def test_logits_of_nvfp4_activations(tiny, tmp_path):
    """Why logits differ from ours though the weights are equal: a second level from the calibration instead of one per
    token, and products of bfloat16. With both they are equal bit for bit; neither is nearer to the 16-bit model."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors, see the extra interop")
    kind = torch.bfloat16
    model = quantized(tiny, recipe("nvfp4", "nvfp4-token"), kind)
    dq.export(model, tmp_path / "out", calibration=RECORDS)
    loaded = decompressed(tmp_path / "out", kind)
    with torch.no_grad():
        exact = tiny.llama(kind, hidden_size=128, intermediate_size=256)(IDS).logits.float()
        ours, theirs = model(IDS).logits.float(), loaded(IDS).logits.float()
        errors = [float((y - exact).norm() / exact.norm()) for y in (ours, theirs)]
        assert 0.8 < errors[0] / errors[1] < 1.25 and not torch.equal(ours, theirs)
        for name, layer in quantized_linears(model).items():
            weight, level = layer.dequantized_weight(kind), loaded.get_submodule(name).input_global_scale
            layer.forward = lambda x, w=weight, g=level: torch.nn.functional.linear(by_their_rule(x, g), w)
        assert torch.equal(model(IDS).logits, loaded(IDS).logits)


@pytest.mark.parametrize("symmetric", [True, False])
def test_their_checkpoint_is_read(tiny, tmp_path, symmetric):
    """The other way: a model that compressed-tensors compressed, read by dq."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors, see the extra interop")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    model = tiny.llama(hidden_size=128, intermediate_size=256)
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": 32}
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    config = QuantizationConfig(config_groups=groups, ignore=["lm_head"], format="pack-quantized")
    apply_quantization_config(model, config)
    expected = {}
    for name, module in model.named_modules():
        if hasattr(module, "quantization_scheme"):
            blocks = module.weight.unflatten(1, (-1, 32))
            scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), module.quantization_scheme.weights)
            module.weight_scale.data.copy_(scale)
            if not symmetric:
                module.weight_zero_point.data.copy_(zero)
            scale, zero = scale[..., None], zero[..., None]
            codes = (blocks / scale + zero).round().clamp(-8, 7)
            expected[name] = ((codes - zero) * scale).flatten(1).detach()
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(str(tmp_path))
    back = dq.load_exported(tmp_path)
    assert set(quantized_linears(back)) == set(expected) and len(expected) == 14
    for name, layer in quantized_linears(back).items():
        assert torch.equal(layer.dequantized_weight(torch.float32), expected[name])


GGUF = [("int8/group32", "Q8_0"), ("int4/group32", "Q4_0"), ("int4_full/group32", "Q4_0")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("weights", "kind"), GGUF)
def test_gguf_in_transformers(tiny, tmp_path, weights, kind, dtype):
    """Read back by transformers, the reordered q and k rows of Llama undone: all weights and the logits are ours."""
    gguf = pytest.importorskip("gguf", reason="needs gguf, see the extra interop")
    from transformers import AutoModelForCausalLM

    model = quantized(tiny, recipe(weights), dtype, tied=dtype == torch.float32)
    dq.export(model, tmp_path / "out", "gguf")
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    assert kinds["blk.0.attn_q.weight"] == kind and kinds["blk.0.attn_norm.weight"] == "F32"
    assert kinds["token_embd.weight"] == ("F32" if dtype == torch.float32 else "BF16")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32)
    for name, layer in quantized_linears(model).items():
        assert torch.equal(loaded.get_submodule(name).weight, layer.dequantized_weight(torch.float32)), name
    with torch.no_grad():
        assert torch.allclose(loaded(IDS).logits, model.float()(IDS).logits, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3", "biased"])
@pytest.mark.parametrize(("weights", "kind"), GGUF)
def test_gguf_comes_back_as_codes(tiny, tmp_path, weights, kind, family):
    """Codes and scales of every linear, rows of q and k in their places, ties, and the logits; by both names of it."""
    pytest.importorskip("gguf", reason="needs gguf, see the extra interop")
    build = qwen(tiny) if family == "qwen3" else None
    changes = dict(attention_bias=True, mlp_bias=True, num_key_value_heads=1) if family == "biased" else {}
    model = quantized(tiny, recipe(weights), torch.bfloat16, build, **({} if build else {"tied": True} | changes))
    if family == "biased":
        model.model.layers[1].self_attn.k_proj.bias.data.normal_()
    out = dq.export(model, tmp_path / "out", "gguf")
    for back in (dq.load_exported(out), dq.load(out / "model.gguf")):
        assert back.lm_head.weight is back.model.embed_tokens.weight and back.dtype == torch.bfloat16
        assert list(quantized_linears(back)) == list(quantized_linears(model))
        for name, layer in quantized_linears(model).items():
            theirs = back.get_submodule(name)
            assert torch.equal(theirs.qweight, layer.qweight), name
            assert torch.equal(theirs.weight_scale, layer.weight_scale) and theirs.weight_scale.dtype == torch.float16
        with torch.no_grad():
            assert torch.equal(back(IDS).logits, model(IDS).logits)
    back.save_pretrained(tmp_path / "native")
    with torch.no_grad():
        assert torch.equal(dq.load(tmp_path / "native")(IDS).logits, model(IDS).logits)


def test_gguf_that_is_not_read(tiny, tmp_path):
    """Blocks of another kind, a tensor that is missing, a file that is none: one line, with the way out."""
    gguf = pytest.importorskip("gguf", reason="needs gguf, see the extra interop")
    out = dq.export(quantized(tiny, recipe("int8/group32")), tmp_path / "out", "gguf") / "model.gguf"

    def rewritten(name, change):
        reader, place = gguf.GGUFReader(out), tmp_path / name
        place.mkdir()
        writer = gguf.GGUFWriter(place / "model.gguf", "llama")
        for field in reader.fields.values():
            if not field.name.startswith(("GGUF.", "general.architecture")):
                writer.add_key_value(field.name, field.contents(), field.types[0])
        for t in reader.tensors:
            data = change(t)
            if data is not None:
                writer.add_tensor(t.name, data[0], raw_dtype=data[1])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return place

    def recoded(t):
        if t.name != "blk.1.ffn_down.weight":
            return t.data, t.tensor_type
        other = gguf.GGMLQuantizationType.Q5_0
        return gguf.quants.quantize(gguf.quants.dequantize(t.data, t.tensor_type), other), other

    place = rewritten("blocks", recoded)
    with pytest.raises(dq.DQError, match=r"layers\.1\.mlp\.down_proj is in Q5_0 blocks, only Q8_0, Q4_0"):
        dq.load_exported(place)
    assert not quantized_linears(dq.load(place))  # unpacked by transformers
    gone = rewritten("gone", lambda t: None if t.name == "blk.0.attn_k.weight" else (t.data, t.tensor_type))
    with pytest.raises(dq.DQError, match=r"it lacks blk\.0\.attn_k\.weight"):
        dq.load_exported(gone)
    (tmp_path / "x.gguf").write_bytes(b"nothing of it")
    with pytest.raises(dq.DQError, match=r"x\.gguf is no GGUF file"):
        dq.load(tmp_path / "x.gguf")


def test_gguf_blocks_by_their_own_reader(tiny, tmp_path):
    """Qwen3, whose rows stay in place, through gguf's own dequantization."""
    gguf = pytest.importorskip("gguf", reason="needs gguf, see the extra interop")
    model = quantized(tiny, recipe("int4/group32"), build=qwen(tiny))
    dq.export(model, tmp_path / "out", "gguf")
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    for ours, theirs in (("self_attn.q_proj", "attn_q"), ("mlp.down_proj", "ffn_down")):
        one = tensors[f"blk.1.{theirs}.weight"]
        values = torch.from_numpy(gguf.quants.dequantize(one.data, one.tensor_type).copy())
        layer = model.get_submodule(f"model.layers.1.{ours}")
        assert torch.equal(values.reshape(layer.weight.shape), layer.dequantized_weight(torch.float32))


def test_gguf_refusals(tiny, tmp_path):
    pytest.importorskip("gguf", reason="needs gguf, see the extra interop")
    for plan, words in (
        (recipe("int4/group64"), "no GGUF block"),
        (recipe("int8/group32", "int8/token"), "activations"),
    ):
        with pytest.raises(dq.DQError, match=rf"cannot export to gguf: model\.layers\.0\.\S+ .*{words}"):
            dq.export(quantized(tiny, plan), tmp_path / "out", "gguf")
    model = quantized(tiny, recipe("int4/group32"))
    model.config.rope_parameters = {"rope_type": "llama3", "rope_theta": 1e4}
    with pytest.raises(dq.DQError, match="rotary embeddings of type llama3"):
        dq.export(model, tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()


def test_config_says_what_runtimes_look_for(tiny, tmp_path):
    model = quantized(tiny, recipe("fp8_e4m3/channel", "fp8_e4m3/token"))
    dq.export(model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    found = config["quantization_config"]
    assert found["quant_method"] == "compressed-tensors" and found["format"] == "float-quantized"
    assert found["ignore"] == ["lm_head"] and found["quantization_status"] == "compressed"
    group = found["config_groups"]["group_0"]
    assert group["weights"]["strategy"] == "channel" and group["input_activations"]["dynamic"] is True
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "float32"
