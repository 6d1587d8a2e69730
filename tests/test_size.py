"""The limits that keep the sources readable: lines per file and function, depth of folders, size of the core."""

import ast

FILE_LINES = 400
FUNCTION_LINES = 30
SHORT_FUNCTIONS = 0.90
CORE_LINES = 3587  # about 3,000 is the aim; the exact number only has to be noticed
# Folders that grow by one file per method, format or rule: each file stands for itself.
DISCOVERED = ("dq/formats/", "dq/packing/", "dq/rewrites/", "dq/rounding/", "dq/scales/", "dq/transforms/")
# Methods that work on finished plans or layers, beside the core and used by nothing below the loop.
METHODS = ("dq/auto.py", "dq/folding.py", "dq/fusing.py", "dq/reconstruct.py", "dq/sequential.py")
# What stands around numbers and algorithms: the command line, and the checks of what callers hand in.
COMMAND_LINE = (
    *("dq/cli.py", "dq/commands.py", "dq/commands_text.py", "dq/commands_export.py", "dq/commands_chat.py"),
    *("dq/commands_bench.py", "dq/commands_call.py", "dq/commands_correct.py"),
    *("dq/showcase.py", "dq/showcase_text.py", "dq/showcase_speed.py", "dq/catalogue.py", "dq/checks.py"),
    "dq/plan_text.py",
)
DEPTH = 2


def _functions(sources):
    """(length, place) of every function; decorators do not count, the docstring does."""
    for s in sources:
        for node in ast.walk(s.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.end_lineno - node.lineno + 1, f"{s.name}:{node.lineno} {node.name}"


def test_files_are_short(root, sources):
    paths = [s.path for s in sources] + sorted((root / "tests").rglob("*.py"))
    lengths = {p.relative_to(root).as_posix(): len(p.read_text(encoding="utf-8").splitlines()) for p in paths}
    long = {name: n for name, n in lengths.items() if n > FILE_LINES}
    assert not long, f"files over {FILE_LINES} lines: {long}"


def test_functions_are_short(sources):
    functions = sorted(_functions(sources), reverse=True)
    long = [f"{n} lines: {place}" for n, place in functions if n > FUNCTION_LINES]
    share = 1 - len(long) / max(len(functions), 1)
    assert share >= SHORT_FUNCTIONS, f"only {share:.1%} have at most {FUNCTION_LINES} lines:\n" + "\n".join(long)


def test_folders_are_shallow(root, sources):
    deep = {s.name for s in sources if len(s.path.relative_to(root).parts) - 2 > DEPTH}
    assert not deep, f"more than {DEPTH} folders below the top one: {sorted(deep)}"


def _code_lines(source) -> int:
    """Lines that hold code: docstrings, comments and blank lines do not make a core harder to read."""
    lines = set()
    documents = {
        id(node.body[0].value)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None
    }
    for node in ast.walk(source.tree):
        if hasattr(node, "lineno") and id(node) not in documents and not isinstance(node, ast.Expr):
            lines.update(
                (node.lineno, node.end_lineno) if hasattr(node, "body") else range(node.lineno, node.end_lineno + 1)
            )
    return len(lines)


def test_core_is_small(sources):
    """Numbers and algorithms; the command line on top of everything does not count."""
    core = [s for s in sources if s.name.startswith("dq/") and s.name not in COMMAND_LINE + METHODS]
    core = [s for s in core if not s.name.startswith(DISCOVERED) or s.name.endswith("__init__.py")]
    total = sum(_code_lines(s) for s in core)
    assert total <= CORE_LINES, f"dq/ has {total} lines of code, the limit is {CORE_LINES}"


def test_folders_are_packages(root, sources):
    """Sub-folders with sources have an ``__init__.py``: discovery and wheels then see them the same way."""
    roots = {root / name for name in ("kernels", "pipelines", "eval")}
    missing = {
        str(s.path.parent.relative_to(root))
        for s in sources
        if s.path.parent not in roots and not (s.path.parent / "__init__.py").is_file()
    }
    assert not missing, f"folders without __init__.py: {sorted(missing)}"
