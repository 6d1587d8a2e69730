"""A recipe's rewrites on a library's model: refused before anything is changed, or applied as a whole."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn

from dq.planning import Plan
from dq.records import Record
from dq.registry import DQError
from dq.rewrites import parameters, rewrite
from dq.rewrites.decoder import decoder_structure
from dq.rewrites.norm_fusion import norm_scale

RESIDUAL = {"r1", "spinquant"}  # rotate the residual stream
REWRITTEN = "its 16-bit weights were rewritten by a try that failed; load it anew, also to continue a resume folder"


def check_rewrites(model: nn.Module, plan: Plan, values: bool = True) -> None:
    """Whatever a rewrite would refuse half way.

    Args:
        values: whether weights are there to be looked at; without, names alone are judged (a plan).

    Raises:
        DQError: an earlier try that failed has begun to rewrite it; no decoder of a known layout; weights that hold no
            data; LayerNorms, whose mean a rewrite takes into the weights before an RMSNorm takes their place: the
            library would build the old class when it loads the checkpoint; a model without output projection whose
            residual stream is to be rotated.
    """
    if getattr(model, "dq_rewritten", ""):
        raise DQError(f"{model.dq_rewritten}: {REWRITTEN}")
    names = {name for name, _ in plan.recipe.rewrites}
    if not names:
        return
    what = f"recipe {plan.recipe.name!r} does not fit {type(model).__name__}: "
    structure = decoder_structure(model, plain=False)
    modules = (*structure.embeddings, *structure.readers, *structure.writers, *(n.name for n in structure.norms))
    if values:
        parameters(model, modules)
    if structure.fixed and names & RESIDUAL:
        raise DQError(f"{what}{structure.fixed}: no rotation of the stream passes it (r2 and norm_fusion do)")
    for site in structure.norms:
        if _is_layer_norm(model.get_submodule(site.name), site.name, values):
            raise DQError(
                f"{what}{site.name} is a LayerNorm, which would become an RMSNorm: the checkpoint would not load again"
            )
        if not site.consumers and names & RESIDUAL:
            raise DQError(f"{what}nothing reads {site.name}: without its output projection it cannot be rotated")


def _is_layer_norm(norm: nn.Module, name: str, values: bool) -> bool:
    return norm_scale(norm, name)[0] == "layer" if values else isinstance(norm, nn.LayerNorm)


def apply_rewrites(model: nn.Module, plan: Plan, records: Sequence[Record], progress: Any = None) -> None:
    """Applies the recipe's rewrites to the 16-bit model.

    Raises:
        DQError: the recipe needs calibration and there is none (nothing is changed then).
    """
    if plan.recipe.needs_calibration and not records:
        raise DQError(f"recipe {plan.recipe.name!r} needs calibration: pass calibration=dq.Text([...], tokenizer)")
    model.dq_rewritten = type(model).__name__  # until all is done; see dq.pipelines.api
    rewrite(model, plan.recipe.rewrites, batches=[_keywords(model, r) for r in records], progress=progress)


def _keywords(model: nn.Module, record: Record) -> dict[str, Any]:
    """A record's call by keywords."""
    return dict(inspect.signature(model.forward).bind(*record.args, **record.kwargs).arguments)
