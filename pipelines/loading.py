"""Opens what a user names on the command line: a local folder or a hub id, of a diffusers pipeline or a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dq import checks
from dq.pipelines import gguf_header
from dq.pipelines.demo import demo_path
from dq.registry import DQError, suggest

GGUF = ".gguf"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# What a language model or text encoder needs beside its weights and that `model.save_pretrained` does not write.
COMPANIONS = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.tiktoken", "*.model",
    "chat_template*", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip


def parse_dtype(name: str) -> torch.dtype:
    """`bf16`, `fp16` or `fp32` as a torch dtype.

    Raises:
        DQError: another word.
    """
    if name not in DTYPES:
        raise DQError(f"unknown dtype {name!r}{suggest(name, DTYPES)}")
    return DTYPES[name]


def folder_of(source: str) -> Path | None:
    """The local folder (or GGUF file) that `source` names, or None for what may be a hub id.

    Raises:
        DQError: an empty name, a file, or what looks like a path and is not there.
    """
    if not str(source).strip():
        raise DQError("the source is empty; give the folder of a pipeline or model, or a hub id")
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == GGUF:
        return path
    if path.is_file():
        raise DQError(f"{source} is a file; give the folder of a pipeline or model, or a hub id")
    if path.is_dir():
        return path
    if str(source).startswith(("/", ".", "~")) or str(source).count("/") > 1 or "\\" in str(source):
        raise DQError(f"{source}: no such folder")
    return None


def load(source: str, dtype: torch.dtype = torch.bfloat16, device: str | None = None) -> Any:
    """A pipeline (`model_index.json`), a diffusers model (`_class_name`) or a transformers model (`architectures`).

    Args:
        source: a local folder, the GGUF file of a language model, or the id of a hub repository.
        device: where it goes; default: a GPU if there is one.

    Raises:
        DQError: a device that is not here; a folder that holds none of these, or files that are damaged or missing
            (naming the folder); a hub id that cannot be loaded.
    """
    target = checks.device(device)
    path = folder_of(source)
    if path is None:
        obj = _load_hub(source, dtype)
    else:
        with checks.one_line(f"cannot load {source}"):
            obj = _load_local(path, dtype)
    with checks.one_line(f"cannot move {source} to {target}"):
        return obj.to(target)


def read_config(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        DQError: naming the file.
    """
    with checks.one_line(f"{path.name} cannot be read"):
        config = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise DQError(f"{path.name} holds a {type(config).__name__}, not an object")
    return config


_OF_CODES = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".scales")


def _load_local(path: Path, dtype: torch.dtype) -> Any:
    if path.suffix == GGUF:
        return _load_gguf(path, dtype)
    _refuse_exported(path)
    if (path / "model_index.json").is_file():
        if "_class_name" not in read_config(path / "model_index.json"):
            raise DQError("model_index.json names no _class_name: it is no pipeline")
        check_components(path)
        from diffusers import DiffusionPipeline

        return DiffusionPipeline.from_pretrained(path, dtype=dtype)
    if not (path / "config.json").is_file():
        raise DQError("it holds neither model_index.json nor config.json: it is no pipeline and no model")
    config = read_config(path / "config.json")
    if "_class_name" in config:
        import diffusers as library

        name = config["_class_name"]
    else:
        import transformers as library

        name = next(iter(config.get("architectures") or ()), None)
        if name is None:
            raise DQError("config.json names no class (neither _class_name nor architectures)")
    cls = model_class(library, name)
    if library.__name__ == "diffusers" or config.get("quantization_config"):
        return cls.from_pretrained(path, dtype=dtype)
    model, said = cls.from_pretrained(path, dtype=dtype, output_loading_info=True)
    # transformers would warn, and go on with codes for weights, or with random numbers.
    codes = sorted(k for k in said["unexpected_keys"] if k.endswith(_OF_CODES))
    if codes:
        raise DQError(f"it holds {codes[0]}, but its config.json has no quantization_config: restore the file")
    return model


def check_components(folder: Path) -> None:
    """Raises DQError if a component that the model_index.json of a pipeline names, [library, class], has no folder;
    diffusers makes something of its own of some."""
    for name, entry in read_config(folder / "model_index.json").items():
        pair = isinstance(entry, list) and len(entry) == 2 and all(isinstance(x, str) for x in entry)
        if pair and not name.startswith("_") and not (folder / name).is_dir():
            raise DQError(f"model_index.json names the component {name!r}, whose folder is missing")


def foreign_file(folder: Path) -> str:
    """The safetensors file that a diffusers model's folder holds in place of diffusers' own, "" if there is none."""
    if not (folder / "config.json").is_file() or "_class_name" not in read_config(folder / "config.json"):
        return ""
    names = sorted(f.name for f in folder.glob("*.safetensors"))
    return "" if any(n.startswith("diffusion_pytorch_model") for n in names) else next(iter(names), "")


def _refuse_exported(path: Path) -> None:
    """Raises DQError for a diffusers model or pipeline that another engine's codes are in: its library cannot read them
    all, or not without that engine's package."""
    from dq.pipelines.exported import in_diffusers, method

    file, parts = foreign_file(path), in_diffusers(path)
    if file:
        what = f"{file} is another engine's file"
    elif parts:
        what = f"{'it' if parts == [path] else f'its {parts[0].name}'} is in the form of {method(parts[0])}"
    else:
        return
    verbs = ("dq.load", "dq inspect", *(("dq eval", "dq generate") if (path / "model_index.json").is_file() else ()))
    verbs = f"{', '.join(verbs[:-1])} and {verbs[-1]}"
    raise DQError(f"{what}: {verbs} read that; this takes the 16-bit one, or what dq quantize saved")


def _load_gguf(path: Path, dtype: torch.dtype) -> Any:
    """The language model in a GGUF file, its weights unpacked."""
    import transformers

    # Newer versions leave the blocks packed where there is a kernel for them, and warn about its dtype first.
    config = getattr(transformers, "GgufConfig", None)
    options = {} if config is None else {"quantization_config": config(dequantize=True)}
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype, **options)
    from dq.pipelines.hf_transformers import release_gguf  # after transformers' own modules, which register it

    release_gguf(model)
    model.config._name_or_path = str(path)  # the origin that is recorded; transformers keeps the folder alone
    return model


def model_class(library: Any, name: Any) -> Any:
    """The model class that a config names.

    Raises:
        DQError: it is none of the library.
    """
    found = getattr(library, name, None) if isinstance(name, str) else None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        version = getattr(library, "__version__", "")
        raise DQError(f"config.json names {name!r}, which is no model of {library.__name__} {version}")
    return found


def _load_hub(source: str, dtype: torch.dtype) -> Any:
    from dq.pipelines import hub

    kind, options = hub.find(source)[0], hub.options(source)
    with checks.one_line(f"cannot load {source} from the hub"):
        if kind == hub.PIPELINE:
            from diffusers import DiffusionPipeline as Loader
        else:
            from transformers import AutoModelForCausalLM as Loader
        return Loader.from_pretrained(source, dtype=dtype, **options)


def load_tokenizer(source: str) -> Any:
    """The tokenizer of a language model folder, GGUF file or hub id.

    Raises:
        DQError: there is none.
    """
    from transformers import AutoTokenizer

    from dq.pipelines.hub import options

    path = folder_of(source)
    if is_pipeline_folder(source):
        raise DQError(
            f"{source} is a pipeline, no language model: it takes --prompts FILE where a model takes --text FILE"
        )
    if path is not None and path.is_dir() and not any(f for p in COMPANIONS for f in path.glob(p)):
        if not (path / "config.json").is_file():
            raise DQError(f"{source} holds neither a tokenizer nor a model")
        raise DQError(f"{source} has no tokenizer: copy the original model's tokenizer files there")
    with checks.one_line(f"{source} has no tokenizer that loads; copy the original model's tokenizer files there"):
        if path is not None and path.suffix == GGUF:
            return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        return AutoTokenizer.from_pretrained(source, **({} if path is not None else options(source)))


def positions(source: str) -> int | None:
    """Tokens that the model in a local folder or GGUF file has positions for; None if that is not known."""
    path = folder_of(source)
    if path is None:
        return None
    if path.suffix == GGUF:
        found = gguf_header.read(path)[0]
        value = found.get(f"{found.get('general.architecture')}.context_length")
    elif (path / "config.json").is_file():
        config = read_config(path / "config.json")
        inner = config.get("text_config")
        value = (config | (inner if isinstance(inner, dict) else {})).get("max_position_embeddings")
    else:
        return None
    return value if isinstance(value, int) and value > 0 else None


def window(length: int | None, source: str, default: int = 2048) -> int:
    """`length`, or without it `default` tokens: fewer where the model `source` has positions for fewer."""
    return length or min(default, positions(source) or default)


def copy_companions(source: str, out: str) -> list[str]:
    """Copies the tokenizer and processor files of the model folder `source` to `out`; returns their names.

    From a hub id or a GGUF file, the tokenizer is loaded and saved. Without any, the list is empty.
    """
    path = folder_of(source)
    if path is None or path.suffix == GGUF:
        try:
            return sorted(Path(f).name for f in load_tokenizer(source).save_pretrained(out))
        except DQError:
            return []
    found = {file for pattern in COMPANIONS for file in path.glob(pattern) if file.is_file()}
    for file in found:
        shutil.copyfile(file, Path(out) / file.name)
    return sorted(file.name for file in found)


def is_pipeline(obj: Any) -> bool:
    """Whether `obj` is a diffusers pipeline rather than a model."""
    return isinstance(getattr(obj, "components", None), dict)


def is_pipeline_folder(source: str) -> bool:
    """Whether `source` is a local folder of a pipeline."""
    path = folder_of(source)
    return path is not None and (path / "model_index.json").is_file()


def is_model_folder(source: str) -> bool:
    """Whether `source` is a local folder (or GGUF file) of one model and no pipeline: known before anything loads."""
    path = folder_of(source)
    if path is not None and path.suffix == GGUF:
        return True
    return path is not None and not (path / "model_index.json").is_file() and (path / "config.json").is_file()


def kind_of(source: str) -> str:
    """`pipeline` or `model`, which a folder, GGUF file or hub id holds; looked up before anything loads.

    Raises:
        DQError: neither; a hub that knows nothing of it.
    """
    from dq.pipelines import hub

    path = folder_of(source)
    if path is None:
        return "pipeline" if hub.find(source)[0] == hub.PIPELINE else "model"
    if is_pipeline_folder(source):
        return "pipeline"
    if not is_model_folder(source) and not any(path.glob(f"*{GGUF}")):
        raise DQError(f"{source} holds neither model_index.json nor config.json: it is no pipeline and no model")
    return "model"


def is_demo(source: str) -> bool:
    """Whether `source` is the demo pipeline, or one that was made from it by `dq quantize` or `dq.quantize`."""
    path = folder_of(source)
    if path is None:
        return False
    demo = Path(demo_path()).resolve()
    if path.resolve() == demo:
        return True
    try:
        config = read_config(path / "transformer" / "config.json")
        origin = Path(config["quantization_config"]["source"])
    except (DQError, KeyError, TypeError):
        return False
    # By the end of the path too: it may have been quantized on another machine.
    return origin.resolve().parent == demo or origin.parts[-4:] == ("pipelines", "demo", "weights", "transformer")


def quiet_libraries() -> None:
    """Switches the loading and saving bars of diffusers and transformers off, for the whole process."""
    import diffusers
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
