"""`dq.load_exported`: checkpoints of other engines, and of `dq.export`, as models with dq's own linears; and `dq.load`,
of these and of everything else that the libraries load."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from dq import checks
from dq.checkpoint import FORMAT_VERSION, finish_model, prepare_model
from dq.linear import QuantizedLinear
from dq.pipelines import gguf_file, loading
from dq.pipelines.expert_names import from_files, of_experts
from dq.pipelines.exported import EXPORTERS, Exporter, Files, Stored, in_diffusers, method, readers
from dq.pipelines.loading import folder_of, model_class, read_config
from dq.pipelines.naming import Rule, entries, from_original
from dq.pipelines.rows import split
from dq.registry import DQError, suggest

PREFIX = "model.diffusion_model."  # of a diffusion model's names in a file that holds a text encoder and a VAE as well


def load_exported(
    source: str | Path, dtype: torch.dtype | None = None, *, config: str | Path | None = None
) -> nn.Module:
    """Reads a checkpoint of another engine's format as a model with dq's own linears, codes as they are.

    Args:
        source: a local folder, written by `dq.export` or by another tool in the same layout; of a pipeline the folder
            of the component. Or one safetensors or GGUF file.
        dtype: of everything that is not quantized; default: what the config or every tensor says.
        config: folder (or file) of the model's config.json, where none lies beside the file.

    Raises:
        DQError: no such folder, a method or a scheme that dq does not read, a tensor that is missing.
    """
    file = gguf_file.file_in(Path(source).expanduser())
    if file is not None:
        return _gguf(file, dtype)
    files = _open(source, config)
    with checks.one_line(f"{source} cannot be read"):
        frame = _frame(files) if "_class_name" in files.config else None
        stored = _reader(files).read(files)
        # Codes without their scales would be loaded as weights of some hundred.
        loose = [k for k, t in files.tensors.items() if _quantized(k, t)]
        if loose:
            raise DQError(f"it lacks the tensors that belong to {loose[0]}")
        if frame is not None:
            return _diffusers(frame, files, stored, dtype)
        return _transformers(files, stored, dtype)


def load(source: str | Path, dtype: torch.dtype | None = None, device: str | None = "cpu") -> Any:
    """A model or pipeline from what `dq.quantize` saved, `dq.export` or another tool wrote, or from 16-bit weights.

    Args:
        source: a local folder (of a pipeline as well), a safetensors or GGUF file (blocks other than Q8_0 and Q4_0 are
            unpacked), or a hub id.
        dtype: of what is not quantized; default: of an exported checkpoint what it holds, otherwise bfloat16.
        device: where it goes; None for a GPU if there is one.

    Raises:
        DQError: nothing there that can be loaded, with the reason.
    """
    target, path = checks.device(device), Path(source).expanduser()
    single = path.is_file() and path.suffix == ".safetensors"
    file = gguf_file.file_in(path)
    if single or (file and gguf_file.holds_codes(file)) or method(path) in readers() or loading.foreign_file(path):
        return load_exported(source, dtype).to(target)
    if in_diffusers(path):
        with checks.one_line(f"cannot load {source}"):
            return _pipeline(path, dtype).to(target)
    return loading.load(str(file or source), dtype or torch.bfloat16, str(target))


def _pipeline(folder: Path, dtype: torch.dtype | None) -> Any:
    """The pipeline around these models; diffusers, which may lack what reads them, loads the rest."""
    from diffusers import DiffusionPipeline

    models = {part.name: load_exported(part, dtype) for part in in_diffusers(folder)}
    return DiffusionPipeline.from_pretrained(folder, dtype=dtype or torch.bfloat16, **models)


def _quantized(name: str, tensor: Tensor) -> bool:
    return tensor.element_size() == 1 or name.rpartition(".")[2].startswith("weight_")


def _open(source: str | Path, config: str | Path | None) -> Files:
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".safetensors":
        found, home = [path], path.parent
    else:
        home = folder_of(str(source))
        if home is None:
            raise DQError(f"{source} is no local folder or safetensors file; load_exported downloads nothing")
        found = sorted(home.glob("*.safetensors"))
        if (home / "model_index.json").is_file():
            raise DQError(
                f"{source} is a whole pipeline: name the folder of the component, e.g. {home / 'transformer'}"
            )
    if not found:
        raise DQError(f"{source} holds no safetensors file: it is no export")
    said = home if config is None else Path(config).expanduser()
    said = said / "config.json" if said.is_dir() else said
    if not said.is_file():
        raise DQError(f"{source} has no config.json beside it: name the model's own with config=")
    tensors, metadata = {}, {}
    for file in found:
        with checks.one_line(f"{file.name} cannot be read"), safe_open(file, "pt") as opened:
            metadata |= opened.metadata() or {}
            tensors |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - not a dict
    if any(k.startswith(PREFIX) for k in tensors):
        tensors = {k.removeprefix(PREFIX): t for k, t in tensors.items() if k.startswith(PREFIX)}
    return Files(path, read_config(said), tensors, metadata)


def _reader(files: Files) -> Exporter:
    known, said = readers(), files.quantization.get("quant_method")
    if said in known:
        return known[said]
    found = next((e for e in EXPORTERS if e.read and e.recognises(files)), None) if said is None else None
    if found is None:
        hint = "; from_pretrained and dq.load open it" if said == "dq" else suggest(str(said), known)
        raise DQError(f"it is quantized by {said!r}{hint}" if said else "it is not quantized in a known format")
    return found


def _buffers(stored: dict[str, Stored], source: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The `quantization_config` of a dq checkpoint of these linears, and its tensors."""
    kinds: list[dict[str, Any]] = []
    layers, tensors = {}, {}
    for name, one in stored.items():
        built = QuantizedLinear.build(
            one.weight, activations=one.activations, steps=one.steps, side=one.side, input_scale=one.input_scale
        )
        kind = built.config.to_dict()
        if kind not in kinds:
            kinds.append(kind)
        layers[name] = {"kind": kinds.index(kind)}
        tensors |= {f"{name}.{key}": t for key, t in built._buffers.items()}
    config = {
        "quant_method": "dq", "format_version": FORMAT_VERSION, "kinds": kinds, "layers": layers,
        "recipe": {"name": "imported"}, "source": str(source),
    }  # fmt: skip
    return config, tensors


def _transformers(files: Files, stored: dict[str, Stored], dtype: torch.dtype | None) -> nn.Module:
    """Through transformers' own loader, as if dq had saved it."""
    import transformers
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(files.path)
    cls = getattr(transformers, next(iter(config.architectures or ()), ""), None)
    if cls is None:
        raise DQError("config.json names no model class of transformers")
    stored, plain = _own_names(cls, config, stored, files.tensors)
    config.quantization_config, tensors = _buffers(stored, files.path)
    return _loaded(cls, config, plain | tensors, dtype or config.dtype)


def _loaded(cls: type, config: Any, tensors: dict[str, Tensor], dtype: torch.dtype) -> nn.Module:
    """transformers fills in what is missing with random numbers, and says so in a report: here it is an error."""
    model, said = cls.from_pretrained(
        None, config=config, state_dict=tensors, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
    )
    for name, there, wanted in sorted(said["mismatched_keys"]):
        raise DQError(f"{name} has the shape {tuple(there)}, the model of its config.json {tuple(wanted)}")
    missing = sorted(said["missing_keys"])
    if missing:
        more = f" (and {len(missing) - 1} more)" if missing[1:] else ""
        raise DQError(f"it lacks {missing[0]}{more}: it is incomplete, or of another model than its config.json")
    return model


def _gguf(file: Path, dtype: torch.dtype | None) -> nn.Module:
    why = gguf_file.available()
    if why:
        raise DQError(f"{file} cannot be read: {why}")
    with checks.one_line(f"{file} cannot be read"):
        config, cls, stored, plain = gguf_file.read(file)
        if not stored:
            raise DQError("it holds no Q8_0 or Q4_0 linears: from_pretrained(gguf_file=...) reads it")
        config.quantization_config, tensors = _buffers(stored, file)
        usual = dtype or _usual_dtype({n: t for n, t in plain.items() if t.dim() > 1})
        return _loaded(cls, config, plain | tensors, usual)


def _own_names(cls: type, config: Any, stored: dict[str, Stored], tensors: dict[str, Tensor]) -> tuple[dict, dict]:
    """Both by the names that the model has in memory, if its files hold quantized experts."""
    if not of_experts(stored):
        return stored, tensors
    plain = copy.deepcopy(config)
    plain.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        model = cls(plain)
    known = from_files(model, [*stored, *tensors])
    return {known[n]: s for n, s in stored.items()}, {known[n]: t for n, t in tensors.items()}


def _frame(files: Files) -> nn.Module:
    """The diffusers model on the meta device; fills in `files.shapes`."""
    import diffusers
    from accelerate import init_empty_weights

    cls = model_class(diffusers, files.config["_class_name"])
    with init_empty_weights():
        model = cls.from_config({k: v for k, v in files.config.items() if k != "quantization_config"})
    files.shapes = {n: tuple(m.weight.shape) for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    for rule in entries(model) or ():
        sizes = [files.shapes[m] for m in rule.members if m in files.shapes]
        if sizes:
            files.shapes[rule.original] = (sum(n for n, _ in sizes), sizes[0][1])
    return model


def _diffusers(model: nn.Module, files: Files, stored: dict[str, Stored], dtype: torch.dtype | None) -> nn.Module:
    """The model, its linears swapped and every tensor assigned."""
    from dq.pipelines.api import attach

    here, cls = model.state_dict(), type(model)
    if any(k not in here for k in [*files.tensors, *(f"{n}.weight" for n in stored)]):
        stored, files.tensors = _renamed(model, stored, files.tensors)
    config, payload = _buffers(stored, files.path)
    prepare_model(model, config, dtype or _usual_dtype(files.tensors))
    keep = getattr(cls, "_keep_in_fp32_modules", None) or ()
    plain = dict(files.tensors)
    if dtype is not None:
        plain = {k: _cast(t, torch.float32 if _kept(k, keep) else dtype) for k, t in plain.items()}
    result = model.load_state_dict(plain | payload, strict=False, assign=True)
    missing, extra = result.missing_keys, result.unexpected_keys
    if missing or extra:
        what = f"lacks {missing[0]}" if missing else f"holds {extra[0]}, which {cls.__name__} has not"
        more = len(missing or extra) - 1
        raise DQError(f"it {what}{f' (and {more} more)' if more else ''}")
    model.requires_grad_(False).eval()
    finish_model(model)
    model.dq_artifact = {k: config[k] for k in ("recipe", "source")}
    attach(model)
    return model


def _usual_dtype(tensors: dict[str, Tensor]) -> torch.dtype:
    """Of most values that are not quantized."""
    counts: Counter[torch.dtype] = Counter()
    for t in tensors.values():
        if t.is_floating_point():
            counts[t.dtype] += t.numel()
    return counts.most_common(1)[0][0] if counts else torch.float32


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _kept(name: str, modules: Any) -> bool:
    return any(part in name.split(".") for part in modules)


def _renamed(
    model: nn.Module, stored: dict[str, Stored], tensors: dict[str, Tensor]
) -> tuple[dict[str, Stored], dict[str, Tensor]]:
    """Matrices and tensors under the original names as the model's own.

    Raises:
        DQError: the architecture's original names are not known, or a matrix has other rows than its members.
    """
    found = entries(model)
    if found is None:
        strange = next(k for k in [*tensors, *stored] if k not in model.state_dict())
        raise DQError(f"{type(model).__name__} has no {strange}, and dq knows no original names of it")
    here, out, plain = dict(model.state_dict()), {}, {}
    for rule in found:
        if rule.original in stored:
            out |= _members(rule, stored[rule.original], here)
        plain |= from_original(rule, tensors, here)
    return out, plain | tensors


def _members(rule: Rule, matrix: Stored, here: dict[str, Tensor]) -> dict[str, Stored]:
    with checks.one_line(rule.original):
        sizes = [here[f"{m}.weight"].shape[0] for m in rule.members]
        return dict(zip(rule.members, split(matrix, sizes, rule.swap), strict=True))
