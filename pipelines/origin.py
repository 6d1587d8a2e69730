"""Where a model came from: the hub repository and revision behind a file, and the licence that its source names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

CACHED, SNAPSHOTS = "models--", "snapshots"  # <cache>/models--OWNER--NAME/snapshots/REVISION/...
LICENCE_FILES = ("LICENSE*", "LICENCE*", "NOTICE*", "license*", "USE_POLICY*")
LICENCE_WORDS = ("license", "license_name", "license_link")  # of a model card's metadata


def origin_of(path: Any) -> dict[str, str]:
    """`source` and `revision` of a file or folder: the hub repository and commit if it lies in the hub's cache (with
    the sub-folder of a component behind the name), else the folder; {} for none."""
    if not isinstance(path, str | Path) or not str(path):
        return {}
    path = Path(path)
    folder = path.parent if path.is_file() else path
    parts = folder.parts
    for i, part in enumerate(parts[:-2]):
        if part.startswith(CACHED) and parts[i + 1] == SNAPSHOTS:
            name = part.removeprefix(CACHED).replace("--", "/")
            return {"source": "/".join([name, *parts[i + 3 :]]), "revision": parts[i + 2]}
    return {"source": str(folder), "revision": ""}


def repository(source: str) -> str:
    """`owner/name` of a recorded source, "" for a folder of this or another machine."""
    parts = source.split("/")
    local = source.startswith((".", "~", "/")) or "\\" in source or Path(source).is_dir()
    return "" if local or len(parts) < 2 else "/".join(parts[:2])


def licence_of(folder: Any) -> dict[str, str]:
    """What the model card in a folder, or in the pipeline's folder around it, says of the licence; {} for nothing."""
    for card in _around(folder, ("README.md",)):
        data = _metadata(card)
        found = {w: str(data[w]) for w in LICENCE_WORDS if data.get(w)}
        if found:
            return found
    return {}


def licence_files(folder: Any) -> list[Path]:
    """The licence and notice files beside a model, or in the pipeline's folder around it."""
    return [p for p in _around(folder, LICENCE_FILES) if p.is_file()]


def _around(folder: Any, patterns: tuple[str, ...]) -> list[Path]:
    """Files in a model's folder; if there are none and it is a component, those of the pipeline."""
    here = Path(folder)
    if not str(folder) or not here.is_dir():
        return []
    places = [here, here.parent] if (here.parent / "model_index.json").is_file() else [here]
    for place in places:
        found = sorted({p for pattern in patterns for p in place.glob(pattern)})
        if found:
            return found
    return []


def _metadata(card: Path) -> dict[str, Any]:
    from huggingface_hub import ModelCard

    try:
        return ModelCard.load(card, ignore_metadata_errors=True).data.to_dict()
    except Exception:  # a card is for people: one that does not parse says nothing
        return {}


def note_origin(model: nn.Module, path: Any = None) -> None:
    """Completes the artifact of a quantized model: repository and revision behind a cached path, and the licence.

    Args:
        path: a file or folder that the model was read from, if a loader knows it better than the model's config.
    """
    artifact = getattr(model, "dq_artifact", None)
    if artifact is None:
        return
    folder = path or artifact.get("source")
    found = origin_of(folder)
    if found.get("source") and (path or found["revision"]):
        artifact |= found
    if "licence" not in artifact:
        place = Path(folder).parent if folder and Path(folder).is_file() else folder
        artifact |= {"licence": licence} if (licence := licence_of(place or "")) else {}
