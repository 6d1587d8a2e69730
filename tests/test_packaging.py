"""The layout (docs/decisions/0001): root folders stay namespaces, and checkout and wheel offer the same packages."""

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kernels", "pipelines", "eval")
HEAVY = ("diffusers", "transformers", "triton", "matplotlib", "torchvision", "torchmetrics", "accelerate", "PIL")


def _python(code, cwd, *, path=(), ok=True):
    """Run ``code`` in a new interpreter with ``path`` in front; the last line it prints is JSON."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env["PYTHONPATH"] = os.pathsep.join(map(str, path))
    command = [sys.executable, "-c", textwrap.dedent(code)]
    run = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if ok:
        assert run.returncode == 0, run.stdout + run.stderr
        return json.loads(run.stdout.strip().splitlines()[-1])
    return run


def test_root_folders_have_no_init():
    found = [name for name in FOLDERS if (ROOT / name / "__init__.py").exists()]
    assert not found, f"{found}: an __init__.py here shadows other packages, `kernels` of transformers among them"


def test_no_name_twice():
    """A name in both dq/kernels/ and kernels/ would hide one of them in a checkout and clash in a wheel."""
    for name in FOLDERS:
        inside = {p.name for p in (ROOT / "dq" / name).iterdir()} - {"__init__.py", "__pycache__"}
        assert not inside, f"dq/{name}/ holds only __init__.py; move {sorted(inside)} to {name}/"


def test_kernels_is_not_shadowed():
    """``kernels`` is nothing, a namespace without code, or the package that somebody installed."""
    found = _python(
        """
        import importlib.util, json
        spec = importlib.util.find_spec("kernels")
        print(json.dumps(spec.origin if spec else None))
        """,
        ROOT,
    )
    assert found is None or "site-packages" in Path(found).parts


# Everything asked of it is a class that takes any arguments and, as a decorator, returns what it decorates.
STUB = """
class _Meta(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Any(metaclass=_Meta):
    def __init__(self, *args, **kwargs): ...

    def __call__(self, value):
        return value


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Any
"""


@pytest.fixture
def stub(tmp_path):
    """A folder with a package ``kernels`` like the one of the index, in the range that transformers accepts."""
    package, layer = tmp_path / "kernels", tmp_path / "kernels" / "layer"
    info = tmp_path / "kernels-0.18.2.dist-info"
    for folder in (layer, info):
        folder.mkdir(parents=True)
    for file in (package / "__init__.py", layer / "__init__.py", layer / "mode.py"):
        file.write_text(STUB)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    (info / "RECORD").write_text("kernels/__init__.py,,\n")
    return tmp_path


IMPORTS = """
import json
import dq, dq.kernels.backends
import transformers, diffusers
from transformers import LlamaForCausalLM
from diffusers import FluxPipeline, FluxTransformer2DModel
try:
    import kernels
except ModuleNotFoundError:
    kernels = None
print(json.dumps(getattr(kernels, "__file__", None)))
"""


def test_transformers_and_diffusers_import_from_the_root():
    found = _python(IMPORTS, ROOT)
    assert found is None or "site-packages" in Path(found).parts


def test_transformers_and_diffusers_import_beside_an_installed_kernels(stub):
    found = _python(IMPORTS, ROOT, path=[stub])
    assert found and Path(found).is_relative_to(stub), f"the installed package has to win, not {found}"


def test_import_is_light(tmp_path):
    """``import dq`` takes under two seconds (the best of three: other processes may run) and loads torch only."""
    runs = [
        _python(
            """
            import sys, time, json
            start = time.perf_counter()
            import dq
            print(json.dumps([time.perf_counter() - start, sorted(sys.modules)]))
            """,
            tmp_path,
            path=[ROOT],
        )
        for _ in range(3)
    ]
    loaded = [name for name in HEAVY if name in runs[0][1]]
    assert not loaded, f"`import dq` loads {loaded}"
    assert min(seconds for seconds, _ in runs) < 2.0


@pytest.fixture(scope="session")
def dist(tmp_path_factory):
    """The wheel and the sdist it was built from; offline, with the hatchling of this venv."""
    if importlib.util.find_spec("build") is None or importlib.util.find_spec("hatchling") is None:
        pytest.skip("build and hatchling are not installed: pip install -e .[dev]")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    run = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert run.returncode == 0, run.stdout + run.stderr
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


def _expected():
    """Path in the checkout -> path in the wheel, for sources, presets and the demo weights."""
    files = [p for top in ("dq", *FOLDERS) for p in (ROOT / top).rglob("*") if p.is_file()]
    names = [p.relative_to(ROOT).as_posix() for p in files if p.suffix in (".py", ".toml", ".safetensors", ".json")]
    # Files that git ignores are not part of a distribution.
    run = subprocess.run(
        ["git", "check-ignore", "--stdin"], cwd=ROOT, input="\n".join(names), capture_output=True, text=True
    )
    ignored = set(run.stdout.splitlines()) if run.returncode == 0 else set()
    return {n: n if n.startswith("dq/") else f"dq/{n}" for n in names if n not in ignored}


def test_sdist_keeps_the_layout(dist):
    with tarfile.open(dist[1]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert not set(_expected()) - names
    assert {"pyproject.toml", "README.md", "LICENSE", "NOTICE", "CHANGELOG.md", "tests/test_packaging.py"} <= names


def test_wheel_holds_everything_below_dq(dist):
    with zipfile.ZipFile(dist[0]) as archive:
        names = set(archive.namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"dq"}, f"top-level names: {sorted(tops)}"
    missing = set(_expected().values()) - names
    assert not missing, f"not in the wheel: {sorted(missing)}"
    assert {f"dq/{name}/__init__.py" for name in FOLDERS} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    text = "\n".join(names)
    assert "dq/presets/" in text or not list((ROOT / "dq/presets").glob("*.toml"))
    assert "dq/pipelines/demo/weights/" in text or not (ROOT / "pipelines/demo/weights").is_dir()


def test_wheel_runs_from_elsewhere(dist, tmp_path):
    """Installed without the checkout on the path, every package is found inside the wheel."""
    target, cwd = tmp_path / "site", tmp_path / "cwd"
    cwd.mkdir()
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(target)]
    run = subprocess.run([*command, str(dist[0])], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert run.returncode == 0, run.stdout + run.stderr
    found = _python(
        """
        import json, dq, dq.kernels, dq.pipelines, dq.eval, dq.kernels.backends, dq.pipelines.families, dq.eval.metrics
        modules = (dq.kernels, dq.kernels.backends, dq.pipelines.families, dq.eval.metrics)
        print(json.dumps([module.__file__ for module in modules]))
        """,
        cwd,
        path=[target],
    )
    assert all(Path(file).is_relative_to(target) for file in found), found
    assert (target / "bin" / "dq").exists() or sys.platform == "win32"
