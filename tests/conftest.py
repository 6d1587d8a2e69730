"""Fixtures that more than one test file uses, and the settings that make runs repeatable."""

import ast
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

# No test reaches a network. Set before diffusers or transformers is imported, which read it once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Read when torch is loaded. Threads that spin while they wait make tests on tiny matrices ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:  # every core has a process of its own
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

# Property tests draw the same examples in every run; what they find is a failure of the code, never of the weather.
settings.register_profile("dq", derandomize=True, deadline=None, database=None, max_examples=25)
settings.load_profile("dq")

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("dq", "kernels", "pipelines", "eval")


@dataclass(frozen=True)
class Source:
    """One Python file of the package: its path, import name, syntax tree and text."""

    path: Path
    module: str
    tree: ast.Module
    text: str

    @property
    def name(self) -> str:
        """The path below the root, for messages."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def is_package(self) -> bool:
        """Whether the file is an ``__init__.py``; relative imports start one level lower then."""
        return self.path.name == "__init__.py"


def module_name(path: Path) -> str:
    """``kernels/backends/x.py`` -> ``dq.kernels.backends.x``; ``__init__.py`` stands for its folder."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] != "dq":
        parts.insert(0, "dq")
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def read_source(path: Path) -> Source:
    """Parse one file. One that does not parse gets an empty tree; `test_sources_parse` names it, the rest goes on."""
    text = path.read_text(encoding="utf-8")
    try:
        tree = ast.parse(text, filename=str(path))
    except SyntaxError:
        tree = ast.Module(body=[], type_ignores=[])
    return Source(path, module_name(path), tree, text)


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder that holds pyproject.toml."""
    return ROOT


@pytest.fixture(scope="session")
def sources() -> list[Source]:
    """Every Python file of dq/, kernels/, pipelines/ and eval/."""
    return [read_source(p) for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.py"))]


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """The builders of tests/tiny.py. Loaded by path: with tests/ on sys.path its folders would hide real packages."""
    spec = importlib.util.spec_from_file_location("dq_tests_tiny", ROOT / "tests" / "tiny.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # so that what it defines can be pickled
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    import random

    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` where there is none."""
    if not any("gpu" in item.keywords for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture
def dq_(capsys):
    """dq_(...) -> (exit status, stdout, stderr) of a command."""
    from dq.cli import main

    def run(*argv):
        status = main([str(a) for a in argv])
        return status, *capsys.readouterr()

    return run
