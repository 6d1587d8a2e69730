"""Lint, format, docstrings of public names, and nothing that belongs to one machine."""

import ast
import importlib.util
import re
import subprocess
import sys

import pytest

# Absolute paths of a home, scratch or checkout folder. Written in parts, so that this file does not match itself.
MACHINE_PATH = re.compile(r"(?<![\w.\-/~}$)])/(?:" + "|".join(("work", "tmp", "root", "home", "mnt", "opt")) + r")/\w")
TEXT = {".py", ".toml", ".md", ".txt", ".json", ".yml", ".yaml", ".cfg", ".html", ".css", ".js", ".sh", ""}


def _tracked(root):
    """The files git knows, or all files with a text suffix where git or its folder is missing (an sdist)."""
    try:
        run = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True)
        names = [name for name in run.stdout.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        names = [p.relative_to(root).as_posix() for p in root.rglob("*.*") if ".venv" not in p.parts]
    paths = [root / name for name in names]
    return [p for p in paths if p.is_file() and p.suffix in TEXT]


def test_sources_parse(sources):
    """On the oldest Python too: f-strings with the same quotes inside need 3.12."""
    for s in sources:
        ast.parse(s.text, filename=s.name, feature_version=(3, 11))


@pytest.mark.parametrize("command", [("check",), ("format", "--check")], ids=["check", "format"])
def test_ruff(root, command):
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("ruff is not installed: pip install -e .[dev]")
    run = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, f"{run.stdout}{run.stderr}\n`make format` repairs most of it"


def test_no_machine_paths(root):
    found = []
    for path in _tracked(root):
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if MACHINE_PATH.search(line):
                found.append(f"{path.relative_to(root)}:{number}: {line.strip()[:120]}")
    assert not found, "paths of one machine:\n" + "\n".join(found)


def test_the_path_pattern_itself():
    for text in ("open('/wor" + "k/x')", '"/tm' + 'p/x"', "see /hom" + "e/me"):
        assert MACHINE_PATH.search(text)
    for text in ("https://host.org/work/x", "a/tmp/b", "${root}/opt/x", "../work/x", "/tmp"):
        assert not MACHINE_PATH.search(text)


def _undocumented(source):
    """Public functions and classes of a module that have no docstring."""
    for node in source.tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node):
            yield f"{source.name}:{node.lineno} {node.name}"


def test_public_names_have_docstrings(sources):
    missing = [place for s in sources for place in _undocumented(s)]
    missing += [f"{s.name}:1 (module)" for s in sources if s.tree.body and not ast.get_docstring(s.tree)]
    assert not missing, "no docstring:\n" + "\n".join(missing)
