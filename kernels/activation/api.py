"""`activate`: the input of a quantized linear as its GEMM takes it, in one launch.

    x_aug = [Q(pre(front(x))) | Q(x'_o - q_o) | (dual) q_o | T1 | T2 | T1 | 0 ...] ~ codes * factor of the row

The second level is one per row, so a GEMM takes the factors in its epilogue. `pack` keeps 4-bit codes and block scales.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dq.kernels.activation.front import Front, apply_front
from dq.kernels.activation.grids import Grid, grid_of, target_refused
from dq.kernels.activation.reference import activate_reference, packed_reference
from dq.kernels.library import capability, define, launch, multiprocessors
from dq.registry import DQError
from dq.spec import QuantSpec
from dq.transforms import Step
from dq.transforms.rotate import rotate

ORDER = ("shift", "smooth", "permute", "rotate")  # of steps, as the kernel takes them
ROTATIONS = (16, 64, 256)
LONGEST = 32768  # values of a row that one program holds
_CODES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8, "packed": torch.uint8}
_NOTHING = Front()
_INVERSES = WeakTensorKeyDictionary()
_REASONS: dict[tuple, str] = {}  # asked at every call
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def why_not(steps: list[Step], grid: QuantSpec, target: str, width: int, residual: int = 0) -> str:
    """Why the kernel cannot make this input, "" if it can.

    Args:
        width: K.
        residual: S.
    """
    key = (tuple(_kind(s) for s in steps), _rotation(steps), grid, target, width, residual)
    if torch.compiler.is_compiling():  # traced once, and not through a cache
        return _reason(*key)
    found = _REASONS.get(key)
    if found is None:
        found = _REASONS[key] = _reason(*key)
    return found


def _kind(step: Step) -> str:
    """The step's name; with a remark that no kernel knows if it is a variant of the step that the kernel has."""
    if step.name == "rotate" and step.params.keys() - {"size"}:
        return f"rotate ({step.params.get('kind', 'variant')})"
    return "shift (scalar)" if step.name == "shift" and "shift" not in step.tensors else step.name


def _rotation(steps: list[Step]) -> int:
    return next((s.params["size"] for s in steps if s.name == "rotate"), 0)


def _reason(names: tuple[str, ...], size: int, grid: QuantSpec, target: str, width: int, residual: int) -> str:
    kind = grid_of(grid)
    if isinstance(kind, str):
        return kind
    if tuple(n for n in ORDER if n in names) != names:
        return f"input steps {', '.join(names)}: the kernel takes {', '.join(ORDER)}, once each, in this order"
    if size and (size not in ROTATIONS or width % size):
        return f"rotation by {size} of {width} columns: the kernel has {', '.join(map(str, ROTATIONS))}"
    if not 0 < width <= LONGEST:
        return f"K = {width}: one program holds a row of at most {LONGEST}"
    groups = kind.kind == "nvfp4" and residual % kind.group == 0 and width % kind.group == 0
    if residual and not (residual <= width and (kind.kind == "fp8" or groups)):
        return f"{residual} residual columns of {grid} at K = {width}: FP8 per token, or whole groups of nvfp4-token"
    return target_refused(kind, target)


@lru_cache(maxsize=256)
def tiling(width: int) -> tuple[int, int, int]:
    """(tiles, chunks of 8 per tile, warps) of a row: three quarters of a power of two, or the whole."""
    whole = max(256, 1 << (width - 1).bit_length())
    tiles, tile = (3, whole // 4) if width <= whole // 4 * 3 and whole >= 1024 else (1, whole)
    return tiles, tile // 8, max(1, min(32, tile // 1024))


def _launch(
    x, gate, weight, bias, mod_scale, mod_shift, shift, factor, order, extra,
    kind, target, group, half, rule, front, eps, size, residual, dual, width,
):  # fmt: skip
    from dq.kernels.activation.jit.kernel import activate_kernel

    m, k = x.shape
    codes, factors, blocks = _empty(x, kind, target, group, residual, dual, width)
    rank = 0 if extra is None else extra.shape[1]
    vectors = [gate, weight, bias, mod_scale, mod_shift, shift, factor, order, extra]
    given = tuple(t is not None for t in vectors)
    grid = (kind, target, group, half, rule)
    constants = _constants(
        k, grid, front, size, residual, dual, rank, width, given, _converts(x.device),
        multiprocessors(x.device.index) if x.is_cuda else 0,
    )  # fmt: skip
    vectors[6] = None if factor is None else _inverse(factor)
    strides = (0 if t is None else t.stride(0) for t in (x, gate, mod_scale, extra))
    if m:
        period = 1 if mod_scale is None else m // len(mod_scale)
        scales = factors if _by_group(kind, target) else blocks
        data = (x, *(x if t is None else t for t in vectors), codes.view(torch.uint8), factors, scales)
        launch(activate_kernel, (m,), (*data, *strides, period, rank, width, eps), constants)
    return codes, factors, blocks


@lru_cache(maxsize=1024)  # of every launch
def _constants(
    k: int, grid: tuple, front: str, size: int, residual: int, dual: bool, rank: int, width: int,
    given: tuple[bool, ...], hardware: bool, processors: int,
) -> dict[str, Any]:  # fmt: skip
    """Compile-time arguments of the kernel, and its options; processors: of the GPU, 0 for the interpreter.

    Measured on an H200 with 4608 rows. Long rows of three tiles would take a few more than 128 registers, which leaves
    12 warps on a processor in place of 16: up to 15 % more time at K = 12288. In one warp the limit gains nothing. The
    compiler spreads the loads of a row that is rotated over its arithmetic, and waits for each: with rows fetched to
    the L2 as far ahead as 16 warps of every processor reach, rotating takes 4 to 20 % less time.
    """
    names = ("GATE", "WEIGHT", "BIAS", "ADALN", "", "SHIFT", "SMOOTH", "PERMUTE", "")
    flags = {n: there for n, there in zip(names, given, strict=True) if n}
    behind = width - _bytes(k + residual * (2 if dual else 1), grid[1])
    tiles, chunks, warps = tiling(k)
    options = dict(maxnreg=128) if tiles > 1 and warps >= 4 and not grid[-1] else {}
    return options | dict(
        zip(("KIND", "TARGET", "GROUP", "HALF", "RULE"), grid, strict=True), **flags, K=k, FRONT=front, ROTATE=size,
        RESIDUAL=residual, DUAL=dual, EXTRA=_pow2(rank) if rank else 0, TAIL=_pow2(behind) if behind else 0,
        HARDWARE=hardware, FUSED=processors > 0, AHEAD=processors * 16 // warps if size and hardware else 0,
        TILES=tiles, C=chunks, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


def _bytes(columns: int, target: str) -> int:
    """Bytes that a row of so many columns takes."""
    return -(-columns // 2) if target == "packed" else columns


def _empty(x, kind, target, group, residual, dual, width) -> tuple[Tensor, Tensor, Tensor]:
    """Unfilled results: codes, factors, and block scales of the target `packed`."""
    m, groups = x.shape[0], 0 if not group else -(-(x.shape[1] + residual * (1 + dual)) // group)
    codes = x.new_empty(m, width, dtype=_CODES[target])
    factors = x.new_empty(m, groups if _by_group(kind, target) else 1, dtype=torch.float32)
    return codes, factors, x.new_empty(m, groups if target == "packed" else 0, dtype=torch.uint8)


def _by_group(kind: str, target: str) -> bool:
    """Whether factors are those of groups, which a product applies to partial sums."""
    return kind == "fp8-group" or (kind == "int4-group" and target == "int8")


def _pow2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _inverse(factor: Tensor) -> Tensor:
    """1 / factor, kept as long as the factor lives: a division costs the kernel as much as all the rest of a row.

    Not kept while a graph is captured: it would have values only once the graph has run.
    """
    version = 0 if factor.is_inference() else factor._version
    kept = _INVERSES.get(factor)
    if kept is None or kept[0] != version:
        kept = version, factor.reciprocal()
        if not (factor.is_cuda and torch.cuda.is_current_stream_capturing()):
            _INVERSES[factor] = kept
    return kept[1]


def _converts(device: torch.device) -> bool:
    """Whether Triton rounds float32 to E4M3 in one step; for sm_89 it truncates to FP16 first."""
    return capability(device) >= (9, 0)


def _spec_of(kind: str, group: int, half: bool, rule: str) -> QuantSpec:
    """The grid that these compile-time facts came from."""
    if kind in ("fp8", "int8", "int4"):
        return QuantSpec({"fp8": "fp8_e4m3"}.get(kind, kind), "token", dynamic=True)
    name = {"int4-group": "int4", "nvfp4": "fp4_e2m1", "mxfp4": "fp4_e2m1"}.get(kind, "fp8_e4m3")
    spec = QuantSpec(name, "group", group, scale_format="fp16" if half else "fp32", dynamic=True)
    if kind == "nvfp4":
        return spec.with_(scale_format="fp8_e4m3", global_scale="token", scale_rule=rule or "absmax")
    return spec.with_(scale_format="e8m0", scale_rule=rule) if rule else spec


def _reference(
    x, gate, weight, bias, mod_scale, mod_shift, shift, factor, order, extra,
    kind, target, group, half, rule, front, eps, size, residual, dual, width,
):  # fmt: skip
    y = apply_front(x.to(torch.float32), Front(front, weight, bias, mod_scale, mod_shift, gate, eps))
    y = y if shift is None else y + shift
    y = y if factor is None else y / factor
    y = y if order is None else y[:, order]
    y = rotate(y, size) if size else y
    spec = _spec_of(kind, group, half, rule)
    if target == "packed":
        return packed_reference(y, spec, residual, dual, width)
    grid = Grid(kind, group, half, rule)
    return *activate_reference(y, grid, spec, target, residual, dual, extra, width), y.new_empty(
        len(y), 0, dtype=torch.uint8
    )


def _fake(
    x, gate, weight, bias, mod_scale, mod_shift, shift, factor, order, extra,
    kind, target, group, half, rule, front, eps, size, residual, dual, width,
):  # fmt: skip
    return _empty(x, kind, target, group, residual, dual, width)


_activate = define(
    "activate(Tensor x, Tensor? gate, Tensor? weight, Tensor? bias, Tensor? mod_scale, Tensor? mod_shift, "
    "Tensor? shift, Tensor? factor, Tensor? order, Tensor? extra, str kind, str target, int group, bool half, "
    "str rule, str front, float eps, int size, int residual, bool dual, int width) -> (Tensor, Tensor, Tensor)",
    _launch, _fake, _reference,
)  # fmt: skip


def _rows(t: Tensor | None, k: int) -> Tensor | None:
    """[..., K] as rows whose elements lie side by side; a view where strides allow it."""
    if t is None:
        return None
    t = t.reshape(-1, k)
    return t if t.stride(-1) == 1 else t.contiguous()


def _tensor(steps: list[Step], name: str, key: str) -> Tensor | None:
    return next((s.tensors[key].contiguous() for s in steps if s.name == name), None)


def activate(
    x: Tensor,
    steps: list[Step],
    grid: QuantSpec,
    target: str = "e4m3",
    residual: int = 0,
    dual: bool = False,
    extra: Tensor | None = None,
    width: int | None = None,
    front: Front | None = None,
) -> tuple[Tensor, Tensor]:
    """(codes [M, width], factors float32 [M, 1]) of x [..., K], M rows in all; groups of FP8, and of INT4 as `int8`,
    have factors of their own, [M, K / group].

    Args:
        x: BF16, FP16 or float32; any strides, the last axis best contiguous.
        steps: input steps, see `why_not`; applied in float32.
        grid: activation grid; values and factors per grid are in dq.kernels.activation.grids.
        target: `e4m3` or `int8`.
        residual, dual: S columns Q(x'_o - q_o) behind K, o the last S transformed columns and Q of the same second
            level (of FP8: of the same factor); then q_o again.
        extra: low-rank input t [M, r], appended as [T1 | T2 | T1], two E4M3 stages; the factor covers it.
        width: columns of the result, the last ones 0; default all that there are.
        front: what stands before the linear.

    Raises:
        DQError: what the kernel does not cover (`why_not`), or shapes that do not fit.
    """
    if target == "packed":
        raise DQError("4-bit codes come with block scales: use dq.kernels.activation.api.pack")
    have = x.shape[-1] + residual * (1 + dual) + (0 if extra is None else 3 * extra.shape[-1])
    return _checked(x, steps, grid, target, residual, dual, extra, have, width, front)[:2]


def pack(
    x: Tensor,
    steps: list[Step],
    grid: QuantSpec,
    residual: int = 0,
    dual: bool = False,
    width: int | None = None,
    front: Front | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(4-bit codes uint8 [M, width], factors float32 [M, 1], block scales uint8 [M, groups]) for block-scaled products.

    Two codes a byte, the first in the low nibble; scales are E4M3 bytes (NVFP4) or biased exponents (MXFP4), row by
    row, none for int4/token. The factor is the second level, 1 for MXFP4. Columns as of `activate`; `width` in bytes.

    Raises:
        DQError: as `activate`.
    """
    have = _bytes(x.shape[-1] + residual * (1 + dual), "packed")
    return _checked(x, steps, grid, "packed", residual, dual, None, have, width, front)


def _checked(x, steps, grid, target, residual, dual, extra, have, width, front) -> tuple[Tensor, Tensor, Tensor]:
    """The operator, after a look at its arguments."""
    k = x.shape[-1]
    reason = why_not(steps, grid, target, k, residual) or _misfit(x, extra, front, target)
    if not reason and width is not None and width < have:
        reason = f"width {width} is less than the {have} columns that there are"
    if reason:
        raise DQError(reason)
    return unchecked(x, steps, grid, target, residual, dual, extra, width or have, front or _NOTHING)


def unchecked(
    x: Tensor,
    steps: list[Step],
    grid: QuantSpec,
    target: str,
    residual: int,
    dual: bool,
    extra: Tensor | None,
    width: int,
    front: Front = _NOTHING,
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator itself, for a caller that has asked `why_not`; (codes, factors, block scales)."""
    k, kind = x.shape[-1], grid_of(grid)
    return _activate(
        _rows(x.detach(), k), _rows(front.gate, k), front.weight, front.bias, front.scale, front.shift,
        _tensor(steps, "shift", "shift"), _tensor(steps, "smooth", "factor"), _tensor(steps, "permute", "order"),
        None if extra is None else _rows(extra, extra.shape[-1]), kind.kind, target, kind.group, kind.half, kind.rule,
        front.kind, front.eps, _rotation(steps), residual, dual, width,
    )  # fmt: skip


def _misfit(x: Tensor, extra: Tensor | None, front: Front | None, target: str) -> str:
    if x.dtype not in _DTYPES:
        return f"input dtype {x.dtype}: the kernel takes BF16, FP16 and float32"
    rows = x.numel() // max(1, x.shape[-1])
    if extra is not None and (target != "e4m3" or extra.numel() != rows * extra.shape[-1]):
        return f"low-rank input of shape {tuple(extra.shape)}: E4M3 takes one row for each of {rows}"
    if front is not None and front.scale is not None and rows % max(1, len(front.scale)):
        return f"{rows} rows do not divide into the {len(front.scale)} rows of adaLN"
    return ""
