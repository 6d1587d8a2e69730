"""A language model out of a GGUF file, its Q8_0 and Q4_0 matrices as dq's own linears: codes and scales as they are.

transformers makes the configuration of the file's metadata, gguf names the tensors. What is no linear is unpacked
(llama.cpp codes embeddings too); a linear in other blocks is refused, `from_pretrained(gguf_file=...)` unpacks those.
Source: ggml's block_q8_0 and block_q4_0; gguf 0.19.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dq.pipelines import gguf_header
from dq.pipelines.exported import Stored
from dq.qtensor import QTensor
from dq.registry import DQError
from dq.spec import QuantSpec

BLOCK = 32
# model_type -> gguf architecture, and whether q and k rows are permuted.
ARCHITECTURES = {"llama": ("llama", True), "mistral": ("llama", True), "qwen2": ("qwen2", False),
                 "qwen3": ("qwen3", False)}  # fmt: skip
GRIDS = {"Q8_0": "int8_full/group32", "Q4_0": "int4_full/group32"}
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DERIVED = ("rope_freqs.weight",)  # what the configuration says too


def available() -> str:
    """Why GGUF files are neither written nor read here, "" if they are."""
    return "" if importlib.util.find_spec("gguf") else "the package gguf is missing: pip install gguf"


def file_in(path: Path) -> Path | None:
    """The GGUF file that a path names: the file itself, or the only weights of a folder."""
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    found = sorted(path.glob("*.gguf")) if path.is_dir() and not list(path.glob("*.safetensors")) else []
    return found[0] if len(found) == 1 else None


def holds_codes(path: Path) -> bool:
    """Whether every matrix of the blocks is in 16 bits or in a grid that is read, and some are in one.

    Raises:
        DQError: no GGUF file, or a damaged one.
    """
    kinds = {e.kind for n, e in gguf_header.read(path)[1].items() if n.startswith("blk.") and len(e.shape) == 2}
    return kinds <= {*GRIDS, *PLAIN} and bool(kinds & set(GRIDS))


def tensor_names(model_type: str, layers: int) -> Any:
    """gguf's table from names in memory to names in files."""
    import gguf

    architecture = ARCHITECTURES[model_type][0]
    return gguf.get_tensor_name_map(next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture), layers)


def permuted(rows: Tensor, heads: int) -> Tensor:
    """Rows [heads * dim, ..] from two halves per head to pairs: where llama.cpp's rotary embedding looks for them."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _restored(rows: Tensor, heads: int) -> Tensor:
    """The inverse of `permuted`."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def turned_heads(config: Any, owner: str) -> int:
    """Heads whose rows of this linear are permuted; 0 if none are."""
    if not ARCHITECTURES[config.model_type][1] or not owner.endswith((".q_proj", ".k_proj")):
        return 0
    return config.num_attention_heads if owner.endswith(".q_proj") else config.num_key_value_heads


def read(path: Path) -> tuple[Any, type, dict[str, Stored], dict[str, Tensor]]:
    """(configuration, class, quantized linears, everything else) of a file.

    Raises:
        DQError: gguf is missing, an architecture or a type of blocks that is not read, a tensor too many or too few.
    """
    import gguf
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    if config.model_type not in ARCHITECTURES:
        raise DQError(f"models of type {config.model_type} are not read, only {', '.join(ARCHITECTURES)}")
    held = {t.name: t for t in gguf.GGUFReader(path).tensors}
    for flag, name in (("attention_bias", "blk.0.attn_q.bias"), ("mlp_bias", "blk.0.ffn_up.bias")):
        if hasattr(config, flag):  # which the metadata does not say
            setattr(config, flag, name in held)
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        model = cls(config)
    names, stored, plain = tensor_names(config.model_type, config.num_hidden_layers), {}, {}
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for name in model.state_dict():
        owner, _, leaf = name.rpartition(".")
        one = held.pop(f"{names.get_name(owner)}.{leaf}", None)
        if one is None:
            if name not in tied:
                raise DQError(f"it lacks {names.get_name(owner)}.{leaf}")
            continue
        linear = leaf == "weight" and isinstance(model.get_submodule(owner), nn.Linear)
        if linear and name not in tied and one.tensor_type.name not in PLAIN:
            stored[owner] = Stored(_quantized(one, owner, turned_heads(config, owner)))
        else:
            plain[name] = _plain(one, turned_heads(config, owner))
    strange = [n for n in held if n not in DERIVED]
    if strange:
        raise DQError(f"it holds {strange[0]}, which {cls.__name__} has not")
    return config, cls, stored, plain


def _bytes(one: Any) -> Tensor:
    return torch.from_numpy(one.data.copy())


def _quantized(one: Any, owner: str, heads: int) -> QTensor:
    """The blocks of one linear, whose rows come back in the model's order."""
    kind = one.tensor_type.name
    if kind not in GRIDS:
        raise DQError(f"{owner} is in {kind} blocks, only {', '.join(GRIDS)} are read as codes; "
                      "from_pretrained(gguf_file=...) unpacks others")  # fmt: skip
    rows = _bytes(one)
    rows = _restored(rows, heads) if heads else rows
    blocks = rows.unflatten(1, (-1, 34 if kind == "Q8_0" else 18))
    scale = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)
    values = blocks[..., 2:].contiguous()
    if kind == "Q4_0":
        values = torch.cat([values & 15, values >> 4], -1) - 8  # of bytes: -8 is 248, the same as int8
    codes, spec = values.view(torch.int8).flatten(1), QuantSpec.parse(GRIDS[kind])
    return QTensor(spec.fmt.pack(codes), scale, None, spec, tuple(codes.shape))


def _plain(one: Any, heads: int) -> Tensor:
    """A tensor in 16 bits or float32; blocks are unpacked to float32."""
    import gguf

    kind = one.tensor_type.name
    if kind == "BF16":
        tensor = _bytes(one).view(torch.bfloat16)
    else:
        tensor = _bytes(one) if kind in PLAIN else torch.from_numpy(gguf.quants.dequantize(one.data, one.tensor_type))
    return _restored(tensor, heads) if heads else tensor
