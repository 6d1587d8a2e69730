"""Training state between two pieces of work, and the finished pipeline folder."""

from __future__ import annotations

import json
import os
import shutil

import torch
from safetensors.torch import load_file, save_file

from . import models, text

SHARD_BYTES = 14_000_000  # files stay under 15 MB


def save_state(folder: str, modules: dict[str, torch.nn.Module], meta: dict) -> None:
    """All parameters in bf16 as `state-<i>.safetensors` of at most SHARD_BYTES, and `meta` as `state.json`."""
    os.makedirs(folder, exist_ok=True)
    shards, size = [{}], 0
    for part, module in modules.items():
        for name, value in module.state_dict().items():
            value = value.detach().to("cpu", torch.bfloat16).contiguous().clone()
            if size + value.nbytes > SHARD_BYTES:
                shards.append({})
                size = 0
            shards[-1][f"{part}/{name}"] = value
            size += value.nbytes
    for i, shard in enumerate(shards):
        path = os.path.join(folder, f"state-{i}.safetensors")
        save_file(shard, path + ".tmp")
        os.replace(path + ".tmp", path)
    with open(os.path.join(folder, "state.json"), "w") as f:
        json.dump(meta, f, indent=1)


def load_state(folder: str) -> tuple[dict[str, dict[str, torch.Tensor]], dict]:
    """({component: state dict in float32}, meta)."""
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith(".safetensors"):
            for key, value in load_file(os.path.join(folder, name)).items():
                part, key = key.split("/", 1)
                parts.setdefault(part, {})[key] = value.float()
    with open(os.path.join(folder, "state.json")) as f:
        return parts, json.load(f)


def build_modules(size: str, tokenizers: str, device="cpu") -> dict[str, torch.nn.Module]:
    """Fresh {transformer, text_encoder, text_encoder_2}."""
    clip, t5 = models.build_text_encoders(size, *text.load_tokenizers(tokenizers))
    parts = {"transformer": models.build_transformer(size), "text_encoder": clip, "text_encoder_2": t5}
    return {k: m.to(device) for k, m in parts.items()}


def restore(modules: dict[str, torch.nn.Module], parts: dict) -> None:
    """Loads what `parts` holds for each module; complains about missing and unexpected names."""
    for name, module in modules.items():
        if name in parts:
            module.load_state_dict(parts[name])


def build_pipeline(state: str, tokenizers: str):
    """FluxPipeline in float32 from a state folder."""
    from diffusers import FluxPipeline

    parts, meta = load_state(state)
    modules = build_modules(meta["size"], tokenizers)
    modules["vae"] = models.build_vae(meta["size"])
    restore(modules, parts)
    modules["vae"].register_to_config(shift_factor=meta["shift_factor"], scaling_factor=meta["scaling_factor"])
    clip, t5 = text.load_tokenizers(tokenizers)
    modules = {k: m.eval() for k, m in modules.items()}
    return FluxPipeline(scheduler=models.build_scheduler(), tokenizer=clip, tokenizer_2=t5, **modules)


def export(state: str, tokenizers: str, out: str) -> None:
    """Writes the pipeline folder in bf16, the transformer in shards of at most SHARD_BYTES."""
    shutil.rmtree(out, ignore_errors=True)
    pipe = build_pipeline(state, tokenizers).to(dtype=torch.bfloat16)
    pipe.save_pretrained(out, max_shard_size=SHARD_BYTES)
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(os.path.join(tokenizers, "tokenizer", name), os.path.join(out, "tokenizer", name))
    for name in ("text_encoder", "text_encoder_2"):
        _set_dtype(os.path.join(out, name, "config.json"))


def _set_dtype(path: str) -> None:
    """Without `torch_dtype` diffusers loads its models in float32 but transformers in the dtype of the config: name
    float32 there, or a plainly loaded pipeline would mix the two and fail in its first linear."""
    with open(path) as f:
        config = json.load(f)
    config["dtype"] = "float32"
    with open(path, "w") as f:
        json.dump(config, f, indent=2, sort_keys=True)
        f.write("\n")
