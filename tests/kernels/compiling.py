"""Compiles a Triton kernel for a generation of GPUs without having one; assembled too, so its instructions exist."""

import os
import re
from typing import Any

import pytest


def build(kernel: Any, generation: int, types: dict[str, str], constants: dict[str, Any], **options: int) -> Any:
    """The compiled `kernel`: PTX in `.asm`, needs in `.metadata`.

    Pointers and `types` of "i32*16" are multiples of 16, other arguments are plain i32.

    Args:
        types: argument -> Triton type.
        constants: values of the constexpr arguments, and of others that are specialized.
    """
    triton = pytest.importorskip("triton", reason="triton is not installed")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET=1: nothing is compiled")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32").removesuffix("*16") for n in names}
    even = [n for n in names if signature[n].startswith("*") or types.get(n, "").endswith("*16")]
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in even}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", generation, 32), options=options)
    assert compiled.asm["cubin"]
    return compiled


def ptx(*what: Any, **options: int) -> str:
    """PTX of a kernel, see `build`."""
    return build(*what, **options).asm["ptx"]


def products(text: str) -> set[str]:
    """Kinds of tensor core instructions in PTX."""
    return set(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]*", text))
