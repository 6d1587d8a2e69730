"""The model card of what is pushed to the hub: recipe, source and revision, the source's licence, how to load it."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from torch import nn

from dq.linear import quantized_linears
from dq.pipelines.origin import LICENCE_WORDS, licence_files, licence_of, repository

BEGIN, END = "<!-- dq: begin -->", "<!-- dq: end -->"
GENERATED = "has been automatically generated"  # in the cards that the libraries write where there is none


def quantized_models(obj: Any) -> dict[str, nn.Module]:
    """component name -> quantized model of a pipeline, {"": model} of a model; {} if nothing is quantized."""
    if isinstance(obj, nn.Module):
        models = {"": obj}
    else:
        held = getattr(obj, "components", None)
        models = held if isinstance(held, dict) else {}
    return {n: m for n, m in models.items() if isinstance(m, nn.Module) and quantized_linears(m)}


def push_with_card(original: Any) -> Any:
    """Wraps the method of either library that uploads a folder: what dq quantized gets its card first."""
    if hasattr(original, "dq_wrapped"):
        return original

    @functools.wraps(original)
    def upload(self, working_dir, repo_id, *args, **kwargs):
        write_card(self, working_dir, repo_id)
        return original(self, working_dir, repo_id, *args, **kwargs)

    upload.dq_wrapped = True
    return upload


def write_card(obj: Any, folder: Any, name: str = "") -> None:
    """Writes (or completes) `README.md` in a folder that holds the saved model or pipeline, and copies the source's
    licence files beside it. A card that is there keeps its text and metadata; does nothing if nothing is quantized.

    Args:
        name: the repository it will be loaded from.
    """
    models = quantized_models(obj)
    if not models:
        return
    path = Path(folder) / "README.md"
    card = ModelCard.load(path, ignore_metadata_errors=True) if path.is_file() else ModelCard("---\n{}\n---\n")
    artifacts = {n: getattr(m, "dq_artifact", {}) for n, m in models.items()}
    licence = next((a["licence"] for a in artifacts.values() if a.get("licence")), {}) or _licence_at_hub(artifacts)
    copied = []
    for file in (f for place in _places(obj, models, artifacts) for f in licence_files(place)):
        if not (Path(folder) / file.name).exists():
            shutil.copyfile(file, Path(folder) / file.name)
        copied.append(file.name)
    for key, value in _metadata(obj, artifacts, licence).items():
        held = card.data.get(key)
        if key == "tags":
            value = [*(held or []), *(t for t in value if t not in (held or []))]
        if value and (not held or key == "tags"):
            card.data[key] = value
    title = f"# {name or type(obj).__name__}\n"
    text = re.sub(re.escape(BEGIN) + ".*?" + re.escape(END), "", card.text, flags=re.DOTALL).strip()
    text = title if not text or GENERATED in text else text
    section = _section(obj, models, artifacts, licence, sorted(set(copied)), name or str(folder))
    card.text = f"{text}\n\n{section}\n"
    card.save(path)


def _places(obj: Any, models: dict[str, nn.Module], artifacts: dict[str, dict[str, Any]]) -> list[str]:
    """Where the source's files may lie: recorded, or where the object was read from."""
    configs = [getattr(x, "config", {}) for x in (*models.values(), obj)]
    read = [c.get("_name_or_path") if isinstance(c, dict) else getattr(c, "_name_or_path", "") for c in configs]
    return [str(p) for p in (*(a.get("source") for a in artifacts.values()), *read) if p]


def _licence_at_hub(artifacts: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The licence that the source's card names now; a push needs the network anyhow. {} if it cannot be had."""
    for artifact in artifacts.values():
        source = artifact.get("source", "")
        if not repository(source):
            found = licence_of(source)
        else:
            try:
                data = ModelCard.load(repository(source)).data.to_dict()
            except Exception:  # offline, private, gated, gone: the card then says that it is not known
                continue
            found = {w: str(data[w]) for w in LICENCE_WORDS if data.get(w)}
        if found:
            return found
    return {}


def _library(obj: Any) -> str:
    bases = {c.__module__.partition(".")[0] for c in type(obj).__mro__}
    return "transformers" if "transformers" in bases else "diffusers"


def _metadata(obj: Any, artifacts: dict[str, dict[str, Any]], licence: dict[str, str]) -> dict[str, Any]:
    """Entries of the card's YAML head."""
    bases = list(dict.fromkeys(filter(None, (repository(a.get("source", "")) for a in artifacts.values()))))
    recipes = [a["recipe"]["name"] for a in artifacts.values() if a.get("recipe")]
    data: dict[str, Any] = {"library_name": _library(obj), "tags": ["dq", *dict.fromkeys(recipes)], **licence}
    if bases:
        data |= {"base_model": bases[0] if len(bases) == 1 else bases, "base_model_relation": "quantized"}
    return data


def _section(obj, models, artifacts, licence, files: list[str], name: str) -> str:
    kinds = {"": type(obj).__name__}
    lines = [BEGIN, "## Quantized with dq", ""]
    lines += ["| part | recipe | linears | weights | made from | revision |", "|---|---|---|---|---|---|"]
    for part, model in models.items():
        a = artifacts[part]
        layers = quantized_linears(model).values()
        grids = Counter(str(m.config.weights) for m in layers)
        grid = ", ".join(f"{g} ({n})" for g, n in grids.most_common())
        recipe = (a.get("recipe") or {}).get("name", "?")
        cells = [part or kinds[""], recipe, str(len(layers)), grid, a.get("source") or "?", a.get("revision") or "?"]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *_usage(obj, name), "", "### Licence", "", *_licence_lines(licence, files)]
    for part, artifact in artifacts.items():
        kept = {k: artifact[k] for k in ("recipe", "calibration", "versions") if artifact.get(k)}
        heading = f"### How it was made{f': {part}' if part else ''}"
        lines += ["", heading, "", "```json", json.dumps(kept, indent=1, sort_keys=True), "```"]
    return "\n".join([*lines, END])


def _usage(obj: Any, name: str) -> list[str]:
    kind = type(obj).__name__
    return [
        "Loading needs `import dq` (`pip install dq-quant`) before `from_pretrained`: codes mean nothing without it.",
        "",
        "```python",
        "import dq, torch",
        f"from {_library(obj)} import {kind}",
        "",
        f'model = {kind}.from_pretrained("{name}", dtype=torch.bfloat16)',
        "```",
    ]


def _licence_lines(licence: dict[str, str], files: list[str]) -> list[str]:
    """What the source says. A quantized model is made from its source: the source's terms go with it."""
    if not licence and not files:
        return [
            "The licence of the source is not known here. Its terms apply to this model: state them before sharing it."
        ]
    named = licence.get("license_name") or licence.get("license") or ""
    link = f" ({licence['license_link']})" if licence.get("license_link") else ""
    what = f"The source is under the licence `{named}`{link}" if named else "The source comes with licence files"
    more = f" Its files are here too: {', '.join(files)}." if files else ""
    return [f"{what}; its terms apply to this model, which was made from it.{more}"]
