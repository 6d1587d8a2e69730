"""Imports only go down (docs/decisions/0004): rows of dq modules, and the place of each third-party package."""

import ast
import sys
from collections.abc import Iterator

# Low to high. A module imports from lower rows and from its own folder; a new core module needs a place here.
ROWS = (
    ("_layout", "version", "constants"),
    ("registry",),
    ("checks", "options"),
    ("spec",),
    ("profiles",),
    ("formats", "scales", "granularity", "packing"),
    ("qtensor",),
    ("columns",),
    ("stats", "records", "family", "tokens", "steps"),
    ("transforms", "rounding"),
    ("rewrites",),
    ("target",),
    ("ops", "recipe", "replay"),
    ("linear_config",),
    ("execution",),
    ("linear", "plan_text"),
    ("conv",),
    ("kernels", "planning"),
    ("checkpoint", "resume", "group", "folding", "fusing"),
    ("auto", "reconstruct", "collect", "sequential"),
    ("loop",),
    ("eval", "pipelines"),
    ("showcase", "showcase_text", "showcase_speed"),
    ("commands_call",),
    ("catalogue", "commands_text", "commands_export", "commands_chat", "commands_bench", "commands_correct"),
    ("commands",),
    ("cli", "__init__"),
)
ROW = {name: i for i, names in enumerate(ROWS) for name in names}

CORE = {"torch", "numpy", "safetensors", "tqdm"}
THIRD_PARTY = {
    "dq": CORE,
    "kernels": CORE | {"triton"},
    "pipelines": CORE
    | {"diffusers", "transformers", "accelerate", "huggingface_hub", "tokenizers", "peft", "PIL"}
    | {"compressed_tensors", "gguf"},
    "eval": CORE
    | {"torchmetrics", "torch_fidelity", "lpips", "torchvision", "stlpips_pytorch", "matplotlib", "PIL", "lm_eval"},
}


def _is_type_checking(node: ast.AST) -> bool:
    """``if TYPE_CHECKING:`` or ``if typing.TYPE_CHECKING:``."""
    if not isinstance(node, ast.If):
        return False
    return getattr(node.test, "id", getattr(node.test, "attr", "")) == "TYPE_CHECKING"


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, functions included, without the bodies of TYPE_CHECKING blocks."""
    for child in ast.iter_child_nodes(tree):
        if _is_type_checking(child):
            for other in child.orelse:
                yield from (other, *_nodes(other))
        else:
            yield child
            yield from _nodes(child)


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """The module an ``import from`` names, with leading dots resolved."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import; ``from a import b`` gives ``a.b``, ``import_module("a")`` gives ``a``."""
    for node in _nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, is_package)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def part(dotted: str) -> str:
    """The row name of ``dq.x.y``: ``x``; of ``dq`` itself, or of a name that its __init__ offers: ``__init__``."""
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROW else "__init__"


def complaint(module: str, folder: str, target: str) -> str | None:
    """Why ``module`` in ``folder`` may not import ``target``, or None."""
    top = target.split(".")[0]
    if top in ("kernels", "pipelines", "eval", "tests"):
        return f"imports {target}: write dq.{target}"
    if top == "dq":
        own, other = part(module), part(target)
        if own == other or ROW[other] < ROW[own]:
            return None
        return f"({own}) imports {target} ({other}), which is not in a lower row"
    if top in sys.stdlib_module_names or top in THIRD_PARTY[folder]:
        return None
    return f"imports {target}: third-party packages allowed in {folder}/ are {', '.join(sorted(THIRD_PARTY[folder]))}"


def folder_of(module: str) -> str:
    """The folder whose third-party rule holds: kernels, pipelines, eval, or dq for the core."""
    name = part(module)
    return name if name in THIRD_PARTY else "dq"


def test_every_module_has_a_row(sources):
    unplaced = [s.name for s in sources if s.module != "dq" and s.module.split(".")[1] not in ROW]
    assert not unplaced, f"add these to ROWS in {__name__}: {unplaced}"


def test_imports_only_go_down(sources):
    found = []
    for s in sources:
        for line, target in imports(s.tree, s.module, s.is_package):
            why = complaint(s.module, folder_of(s.module), target)
            if why:
                found.append(f"{s.name}:{line} {why}")
    assert not found, "\n".join(found)


def test_the_rule_itself():
    """The checker sees lazy, relative and string imports, and spares TYPE_CHECKING blocks."""
    code = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import diffusers\n"
        "def f():\n    import triton\n    from ..linear import QuantizedLinear\n    import_module('diffusers')\n"
    )
    found = [target for _, target in imports(ast.parse(code), "dq.formats.fp8", False)]
    assert found == ["typing.TYPE_CHECKING", "triton", "dq.linear.QuantizedLinear", "diffusers"]
    assert complaint("dq.formats.fp8", "dq", "triton")
    assert complaint("dq.formats.fp8", "dq", "dq.linear.QuantizedLinear")
    assert complaint("dq.stats", "dq", "dq.records.Record")
    assert complaint("dq.linear", "dq", "dq.loop")
    assert complaint("dq.pipelines.x", "pipelines", "dq.evaluate")  # a name of dq/__init__, which is the top row
    assert complaint("dq.kernels.x", "kernels", "kernels.y")
    assert complaint("dq.kernels.x", "kernels", "triton.language") is None
    assert complaint("dq.formats.fp8", "dq", "dq.formats.int8.INT8") is None
    assert complaint("dq.cli", "dq", "dq.pipelines.demo") is None
