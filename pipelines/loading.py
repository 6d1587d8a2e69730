"""Opens what a user names on the command line: a local folder or a hub id, of a diffusers pipeline or a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from dq.registry import DQError, suggest

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def default_device() -> str:
    """`cuda` if there is a GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def parse_dtype(name: str) -> torch.dtype:
    """`bf16`, `fp16` or `fp32` as a torch dtype.

    Raises:
        DQError: another word.
    """
    if name not in DTYPES:
        raise DQError(f"unknown dtype {name!r}{suggest(name, DTYPES)}")
    return DTYPES[name]


def load(source: str, dtype: torch.dtype = torch.bfloat16, device: str | None = None) -> Any:
    """A pipeline (`model_index.json`), a diffusers model (`_class_name`) or a language model (`architectures`).

    Args:
        source: a local folder, or the id of a hub repository.
        device: where it goes; default: a GPU if there is one.

    Raises:
        DQError: a folder that holds none of these, or a hub id that cannot be loaded.
    """
    device = device or default_device()
    path = Path(source)
    if path.is_file():
        raise DQError(f"{source} is a file; give the folder of a pipeline or model, or a hub id")
    if path.is_dir():
        obj = _load_local(path, dtype)
    else:
        obj = _load_hub(source, dtype)
    return obj.to(device)


def _load_local(path: Path, dtype: torch.dtype) -> Any:
    if (path / "model_index.json").is_file():
        from diffusers import DiffusionPipeline

        return DiffusionPipeline.from_pretrained(path, dtype=dtype)
    if not (path / "config.json").is_file():
        raise DQError(f"{path} holds neither model_index.json nor config.json: it is no pipeline and no model")
    config = json.loads((path / "config.json").read_text())
    if "_class_name" in config:
        import diffusers

        return getattr(diffusers, config["_class_name"]).from_pretrained(path, dtype=dtype)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def _load_hub(source: str, dtype: torch.dtype) -> Any:
    from diffusers import DiffusionPipeline
    from transformers import AutoModelForCausalLM

    problems = []
    for kind, call in (
        ("pipeline", lambda: DiffusionPipeline.from_pretrained(source, dtype=dtype)),
        ("language model", lambda: AutoModelForCausalLM.from_pretrained(source, dtype=dtype)),
    ):
        try:
            return call()
        except (OSError, ValueError) as error:
            problems.append(f"as a {kind}: {str(error).splitlines()[0][:160]}")
    raise DQError(f"{source!r} is no local folder and could not be loaded from the hub; " + "; ".join(problems))


def load_tokenizer(source: str) -> Any:
    """The tokenizer of a language model folder or hub id."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source)


def is_pipeline(obj: Any) -> bool:
    """Whether `obj` is a diffusers pipeline rather than a model."""
    return isinstance(getattr(obj, "components", None), dict)
