"""GGUF with the blocks Q8_0 and Q4_0, for llama.cpp, Ollama and `from_pretrained(gguf_file=...)`.

    Q8_0  34 bytes for 32 values: float16 d, 32 x int8 q; x = d q
    Q4_0  18 bytes for 32 values: float16 d, 16 bytes; byte j holds q_j + 8 low and q_(j+16) + 8 high; x = d q

Codes and scales of dq's `int8/group32` and `int4/group32` are these blocks: nothing is rounded again. Everything that
is not quantized is written in its own 16 bits, vectors in float32. Llama's q and k rows are reordered as llama.cpp's
rotary embedding wants them. No tokenizer is written: llama.cpp needs one, transformers takes it from elsewhere.
Source: ggml's block_q8_0 and block_q4_0; gguf 0.19.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dq.linear import QuantizedLinear
from dq.pipelines.exported import EXPORTERS, Exporter, Job, not_plain, plain_values
from dq.pipelines.gguf_file import ARCHITECTURES, BLOCK, available, permuted, tensor_names, turned_heads
from dq.spec import QuantSpec


def _kind(spec: QuantSpec) -> str:
    """`Q8_0`, `Q4_0`, or "" for another grid."""
    if spec.strategy != "group" or spec.group_size != BLOCK or spec.scale_format != "fp16" or spec.global_scale:
        return ""
    return {"int8": "Q8_0", "int4": "Q4_0"}.get(spec.format.removesuffix("_full").removesuffix("_wide"), "")


def _refuse(job: Job, name: str) -> str:
    layer, config = job.layers[name], job.model.config
    if config.model_type not in ARCHITECTURES:
        return f"models of type {config.model_type} are not written, only {', '.join(ARCHITECTURES)}"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        return f"rotary embeddings of type {rope['rope_type']} are not written"
    if not_plain(layer, name):
        return not_plain(layer, name)
    if not _kind(layer.config.weights):
        return f"weights {layer.config.weights} are no GGUF block; int8/group32 is Q8_0 and int4/group32 is Q4_0"
    if job.activations(name) is not None:
        return "its activations are quantized, which GGUF cannot say; weight_only=True leaves them in 16 bits"
    return f"its {layer.in_features} inputs are no multiple of 32" if layer.in_features % BLOCK else ""


def blocks(layer: QuantizedLinear) -> Tensor:
    """The blocks of one linear, uint8 [N, K / 32 * 34 or 18]."""
    codes = plain_values(layer).unflatten(1, (-1, BLOCK))
    scale = layer.qtensor.scale.contiguous().view(torch.uint8).unflatten(1, (-1, 2))
    if _kind(layer.config.weights) == "Q8_0":
        packed = codes.contiguous().view(torch.uint8)
    else:
        plus = (codes + 8).to(torch.uint8)
        packed = plus[..., : BLOCK // 2] | (plus[..., BLOCK // 2 :] << 4)
    return torch.cat([scale, packed], -1).flatten(1)


def _metadata(writer: Any, config: Any, kinds: set[str]) -> None:
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_name(str(getattr(config, "_name_or_path", "") or config.model_type))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 1e4)))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_quantization_version(2)
    writer.add_file_type(2 if kinds == {"Q4_0"} else 7)  # llama.cpp's numbers of "mostly Q4_0" and "mostly Q8_0"


def _array(tensor: Tensor) -> tuple[np.ndarray, str]:
    """A 16-bit or float32 tensor as GGUF holds it, and the name of its type."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dim() < 2 or tensor.dtype == torch.float32:
        return tensor.to(torch.float32).numpy(), "F32"
    if tensor.dtype == torch.float16:
        return tensor.numpy(), "F16"
    return tensor.to(torch.bfloat16).view(torch.uint8).numpy(), "BF16"


def _write(job: Job, folder: Path) -> None:
    import gguf

    config = job.model.config
    architecture, names = ARCHITECTURES[config.model_type][0], tensor_names(config.model_type, config.num_hidden_layers)
    folder.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    _metadata(writer, config, {_kind(x.config.weights) for x in job.layers.values()})
    for name, tensor in _tensors(job).items():
        owner, _, leaf = name.rpartition(".")
        heads = turned_heads(config, owner)
        tensor = permuted(tensor, heads) if heads else tensor
        target = f"{names.get_name(owner)}.{leaf}"
        if owner in job.layers and leaf == "weight":
            kind = _kind(job.layers[owner].config.weights)
            writer.add_tensor(target, tensor.cpu().numpy(), raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            array, kind = _array(tensor)
            writer.add_tensor(target, array, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(job: Job) -> dict[str, Tensor]:
    """name -> rows of blocks, or the tensor itself; tied ones once."""
    tied, out = getattr(job.model, "all_tied_weights_keys", None) or {}, {}
    for name, tensor in job.model.state_dict().items():
        owner, _, leaf = name.rpartition(".")
        if name not in tied and (owner not in job.layers or leaf == "bias"):
            out[name] = tensor
    return out | {f"{name}.weight": blocks(layer) for name, layer in job.layers.items()}


EXPORTERS.register(
    Exporter("gguf", "llama.cpp, Ollama, transformers: Q8_0, Q4_0", _refuse, _write, available=available)
)
