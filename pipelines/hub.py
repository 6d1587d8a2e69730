"""What the hub says of a repository before it is loaded: asked once, where loaders would retry for a minute."""

from __future__ import annotations

from functools import lru_cache

from dq import checks
from dq.registry import DQError

PIPELINE, MODEL = "model_index.json", "config.json"  # what a repository of either kind holds


@lru_cache(maxsize=16)
def find(source: str) -> tuple[str, bool]:
    """(`model_index.json` or `config.json`, whether it is in the local cache alone) of a hub id.

    Raises:
        DQError: no such repository; one that holds neither; the hub cannot be reached and the cache has nothing of it.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        held = {s.rfilename for s in HfApi().model_info(source, timeout=10).siblings or ()}
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise DQError(
            f"{source!r} is no local folder, and the hub has no repository of that name (a private one needs `hf auth "
            "login`)"
        ) from error
    except Exception as error:  # of any library below: no network, no answer in time, HF_HUB_OFFLINE
        for name in (PIPELINE, MODEL):
            if isinstance(try_to_load_from_cache(source, name), str):
                return name, True
        why = checks.line(error, 80)
        raise DQError(
            f"{source!r} is no local folder, the hub cannot be reached ({why}), and its cache has no copy"
        ) from error
    name = next((n for n in (PIPELINE, MODEL) if n in held), None)
    if name is None:
        raise DQError(f"the repository {source!r} holds neither {PIPELINE} nor {MODEL}: it is no pipeline and no model")
    return name, False


def options(source: str) -> dict[str, bool]:
    """Keyword arguments of `from_pretrained`, which does not ask a hub that cannot be reached."""
    return {"local_files_only": True} if find(source)[1] else {}
