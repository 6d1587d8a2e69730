"""Where the root folders ``kernels/``, ``pipelines/`` and ``eval/`` are found.

In a checkout they lie beside ``dq/``; a wheel carries them inside it. A folder ``kernels/`` with an ``__init__.py`` in
the root would shadow the package ``kernels`` that transformers probes for, so they have none and the small packages
``dq.kernels``, ``dq.pipelines`` and ``dq.eval`` extend their search path instead (docs/decisions/0001).
"""

from collections.abc import Iterable
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent


def extend(path: Iterable[str], name: str) -> list[str]:
    """Return the package search ``path``, with the root folder ``name`` added when dq runs from a checkout."""
    side = _ROOT / name
    # pyproject.toml tells a checkout from site-packages, where a folder of that name belongs to somebody else.
    if (_ROOT / "pyproject.toml").is_file() and side.is_dir():
        return [*path, str(side)]
    return list(path)


def is_ours(file: str) -> bool:
    """Whether a source file is one of dq's, wherever it lies; a virtual environment in the checkout is not."""
    own = [str(_ROOT / "dq"), *(f for name in ("kernels", "pipelines", "eval") for f in extend([], name))]
    return any(Path(file).resolve().is_relative_to(folder) for folder in own)
