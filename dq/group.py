"""One plan row: transforms, rounding, and the layers that come out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from dq.columns import join_columns, take_columns
from dq.conv import like, matrix
from dq.linear import QuantizedLinear
from dq.ops import reference_qlinear
from dq.planning import Plan, PlanRow
from dq.qtensor import QTensor, check_finite, choose_scale, executed_amax
from dq.recipe import Target
from dq.registry import DQError
from dq.rounding import ROUNDINGS, Job
from dq.scales import find_rule
from dq.stats import Stat
from dq.steps import StepGroups, tops_by_step
from dq.transforms import TRANSFORMS, GroupState, apply_steps

FEW = 32  # tokens below which an expert's statistics say nothing


def _group_state(model: nn.Module, row: PlanRow, stats: dict[str, Stat], device) -> GroupState:
    """The row's weights in float32, checked for NaN/Inf."""
    weights = {}
    for m in row.members:
        w = matrix(model.get_submodule(m))
        check_finite(w, f"{m}.weight")
        weights[m] = w.detach().to(device=device or w.device, dtype=torch.float32)
    kind = model.get_submodule(row.members[0]).weight.dtype
    rank = sum(
        TRANSFORMS.get(n).plan(row.shapes[0], row.k_parts, dict(p), row.members[0]).rank
        for n, p in row.target.transforms
    )
    return GroupState(
        weights,
        row.inputs,
        row.target.weights,
        row.target.activations,
        _reached(row, stats),
        row.lowrank,
        row.k_parts,
        rank,
        side_dtype=kind if kind in (torch.float16, torch.bfloat16) else torch.bfloat16,
    )


def reachable(row: PlanRow, stats: dict[str, Stat]) -> PlanRow:
    """The row as calibration allows: experts that hardly a token was sent to are rounded to nearest, and say so.

    A router sends some experts nothing on a small calibration set, and a Hessian or a smoothing factor of a few tokens
    is noise. Everything else that saw no input is a mistake, which `_reached` reports.
    """
    counts = [sum(stats[i[0]].count.values()) for i in row.inputs if i[0] in stats]
    if not counts or min(counts) >= FEW or not row.target.needs_calibration:
        return row
    if not is_expert(row):
        return row
    names = f"{row.members[0]}{f' and {len(row.members) - 1} more' * (len(row.members) > 1)}"
    text = f"{names}: this expert saw {min(counts)} tokens in calibration"
    warnings.warn(f"{text}: rounded to nearest, without calibrated transforms", stacklevel=3)
    return replace(row, target=data_free(row.target), reason="rounded to nearest: too few tokens")


def is_expert(row: PlanRow) -> bool:
    """Whether a router decides what the row's linears see."""
    return any("expert" in part for m in row.members for part in m.split("."))


def data_free(target: Target) -> Target:
    """The target without all that needs calibration: scale rules by their plain one, dynamic activation scales."""
    rule = find_rule(target.weights)
    weights = replace(target.weights, scale_rule=rule.plain, rule_params=()) if rule.needs else target.weights
    acts = target.activations
    if acts is not None and acts.strategy == "tensor":
        acts = replace(acts, strategy="token")
    kinds = [(n, p) for n, p in target.transforms if not _calibrated(n, dict(p))]
    return Target(weights, acts, tuple(kinds))


def _calibrated(name: str, params: dict) -> bool:
    kind = TRANSFORMS.get(name)
    return kind.calibrated(params) or kind.needs_gram(params)


def _reached(row: PlanRow, stats: dict[str, Stat]) -> dict[str, Stat]:
    """Statistics of the row's inputs, without those that calibration never reached.

    Raises:
        DQError: one of them is needed.
    """
    found = {i[0]: stats[i[0]] for i in row.inputs if i[0] in stats}
    for stat in found.values():
        if not stat.count and row.target.needs_calibration:
            stat.amax()  # says so
    return {name: stat for name, stat in found.items() if stat.count}


def check_weights(model: nn.Module, plan: Plan) -> None:
    """Before anything runs: every weight to be quantized is there, and every parameter of the model is finite (of what
    stays in 16 bits and of biases too: a model that computes NaN cannot be judged).

    Raises:
        DQError: naming the first that is not.
    """
    for name in (m for row in plan.quantized for m in row.members):
        if model.get_submodule(name).weight.is_meta:
            raise DQError(f"{name}.weight holds no data (offloaded, or not loaded yet): quantize before offloading")
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.itemsize > 1 and not parameter.is_meta:
            check_finite(parameter, name)


def transformed(model: nn.Module, row: PlanRow, stats: dict[str, Stat], device=None) -> GroupState:
    """The row's group after all its transforms."""
    row = reachable(row, stats)
    state = _group_state(model, row, stats, device)
    for name, params in row.target.transforms:
        TRANSFORMS.get(name).fit(state, **dict(params))
    return state


def quantize_row(
    model: nn.Module, row: PlanRow, stats: dict[str, Stat], device=None, state: GroupState | None = None
) -> dict[str, QuantizedLinear]:
    """Transforms (unless `state` is what its transforms gave) and rounds one plan row; the model is not touched."""
    row = reachable(row, stats)
    state = transformed(model, row, stats, device) if state is None else state
    layers = {}
    for members in row.inputs:
        shifted = any(step.name == "shift" for step in state.steps)
        biased = [m for m in members if shifted or model.get_submodule(m).bias is not None]
        for m, weight in round_members(state, row.target, members, biased).items():
            old = model.get_submodule(m)
            layer = QuantizedLinear.build(
                weight,
                activations=state.act_spec,
                steps=state.steps,
                side=state.side.get(m),
                bias=None if old.bias is None else old.bias.to(weight.codes.device),
                dtype=old.weight.dtype,
                **_static(state, row.target, m),
                residual=state.residual,
                dual=state.dual,
            )
            _take_off_constant(layer)
            stat, raw = state.stat(m), matrix(old).detach().to(weight.codes.device, torch.float32)
            if row.target.bias_correction and stat is not None:
                _correct_bias(layer, raw, stat.rows.to(raw), old.bias)
            sample = None if stat is None else stat.held_rows[:128].to(raw)
            layer.sqnr_db = sqnr_db(layer, raw, sample, old.bias)
            layers[m] = like(layer, old)
    return layers


def round_members(
    state: GroupState, target: Target, members: tuple[str, ...], biased: Sequence[str] = ()
) -> dict[str, QTensor]:
    """The weights of linears that share an input as they will be stored, residual channels appended.

    Args:
        biased: members with a bias, which a correction can use.
    """
    rounding, first = ROUNDINGS.get(target.rounding), members[0]
    # Runtimes fuse linears that share an input: they must share the second-level scale, so it covers them all.
    amax = executed_amax([state.weights[m] for m in members], state.weight_spec)
    if amax is None:
        amax = torch.stack([state.weights[m].abs().amax() for m in members]).amax()
    error = state.activation_error(first) if rounding.needs_gram else None
    shared = dict(x=state.rows(first), amax=amax, hessian=state.hessian(first) if target.needs_gram else None)
    mean = state.mean(first) if target.bias_correction else None
    shared |= dict(gain=error and error[0], noise=error and error[1], residual=state.residual if state.dual else 0)
    out = {}
    for m in members:
        job = Job(m, state.weights[m], state.weight_spec, mean=mean if m in biased else None, **shared)
        main, rest = rounding.round(job, **dict(target.rounding_params))
        if state.residual:
            again = take_columns(main, state.width - state.residual)
            main = join_columns([main, again] if rest is None else [main, again, rest])
        out[m] = main
    return out


def _take_off_constant(layer: QuantizedLinear) -> None:
    """`b' = b - Q(W') pre(0)` where the input is shifted.

    With the rounded weight: the shift then meets no rounding error of the weight, only the input itself does. (The
    source takes the unrounded one; on synthetic GELU inputs that has a tenth more error.)
    """
    constant = layer.constant()
    if constant is not None:
        bias = -constant if layer.bias is None else layer.bias.to(torch.float32) - constant
        layer.bias = nn.Parameter(bias.to(layer.compute_dtype), requires_grad=False)


def _correct_bias(layer: QuantizedLinear, weight: Tensor, x: Tensor, bias: Tensor | None) -> None:
    """`b + E[W x - Q(W') Q(pre(x))]` over a sample x [n, K], b the original's bias: the output keeps its mean. Layers
    without a bias stay.

    Source: Nagel et al., "Data-free quantization through weight equalization and bias correction" (arXiv 1906.04721).
    """
    if layer.bias is not None:
        new = (x @ weight.T - reference_qlinear(x, replace(layer.params, bias=None))).mean(0)
        new = new if bias is None else new + bias.to(new)
        layer.bias = nn.Parameter(new.to(layer.compute_dtype), requires_grad=False)


def _static(state: GroupState, target: Target, name: str) -> dict[str, Tensor | None]:
    """`input_scale`, and `input_edges` of step groups: what a layer with a static activation grid keeps of it.

    Raises:
        DQError: without calibration, or step groups without timesteps.
    """
    if not target.step_groups:
        return {"input_scale": _input_scale(state, name)}
    state.require_stats("a static activation scale")
    tops = state.stat(name).absmax
    found = {s: float(apply_steps(t.to(state.weights[name])[None], state.steps).max()) for s, t in tops.items()}
    groups = StepGroups.fit(tops_by_step(found), target.step_groups, name)
    scales = [choose_scale(top.reshape(1, 1), state.act_spec).scale for top in groups.tops]
    device = state.weights[name].device
    return {"input_scale": torch.cat(scales).to(device, torch.float32), "input_edges": groups.edges.to(device)}


def _input_scale(state: GroupState, name: str) -> Tensor | None:
    """[1, 1] scale of a static activation grid, chosen by its rule on the calibration sample of the transformed input,
    stretched to the largest value that any token had where the rule clips nothing.

    Raises:
        DQError: without calibration.
    """
    spec = state.act_spec
    if spec is None or spec.strategy != "tensor":
        return None
    state.require_stats("a static activation scale")
    rows = state.rows(name).to(torch.float32)
    if spec.scale_rule == "absmax" and all(s.name == "smooth" for s in state.steps):
        first = next(i[0] for i in state.inputs if name in i)
        top = apply_steps(state.stats[first].amax().to(rows)[None], state.steps)
        rows = torch.cat([rows, top])
    return choose_scale(rows, spec).scale.to(torch.float32)


def sqnr_db(layer: QuantizedLinear, weight: Tensor, x: Tensor | None, bias: Tensor | None = None) -> float | None:
    """`10 log10(||y||^2 / ||y_q - y||^2)` of the layer's output on x [n, K], the original's bias excluded (but not what
    a shift or a correction added to it); without x of its weight. At most 300; None where the signal is zero, or beyond
    float32."""
    if x is None:
        signal, noise = weight, layer.dequantized_weight(torch.float32) - weight
    else:
        added = layer.bias
        if added is not None and bias is not None:
            added = added.to(torch.float32) - bias.to(added.device, torch.float32)
        signal = x @ weight.T
        noise = reference_qlinear(x, replace(layer.params, bias=added)) - signal
    power, lost = (float(t.to(torch.float64).square().sum()) for t in (signal, noise))
    if not power or not math.isfinite(power + lost):
        return None
    return round(10 * math.log10(max(power / max(lost, 1e-30 * power), 1e-30)), 3)
