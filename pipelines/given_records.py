"""Calibration records that a caller hands in: checked before the first of them runs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dq.records import Record, tensors
from dq.registry import DQError
from dq.tokens import embedding_rows


def checked_record(item: Any, index: int, model: nn.Module) -> Record:
    """One record, with arguments that the model's forward takes.

    Raises:
        DQError: it is none, holds no tensor, or the model does not take it; token ids that are no [batch, tokens] of
            integers, are none at all, or lie beyond the embedding; a mask of another shape. Each names the record.
    """
    if isinstance(item, Mapping):  # a dict, or what a tokenizer returns
        item = Record((), dict(item))
    if not isinstance(item, Record):
        hint = "; texts go into dq.Text([...], tokenizer), prompts of a pipeline into dq.Prompts([...])"
        raise DQError(
            f"a calibration record is a dq.Record or a dict of keyword arguments, got {type(item).__name__}"
            f"{hint if isinstance(item, str) else ''}"
        )
    what = f"calibration record {index}"
    if not tensors((item.args, item.kwargs)):
        raise DQError(f"{what} holds no tensor; give what {type(model).__name__} is called with")
    try:
        bound = inspect.signature(model.forward).bind(*item.args, **item.kwargs).arguments
    except TypeError as error:
        raise DQError(f"{what} does not fit {type(model).__name__}: {error}") from error
    complaint = _tokens_complaint(bound.get("kwargs", {}) | bound, model)
    if complaint:
        raise DQError(f"{what} does not fit {type(model).__name__}: {complaint}")
    return item


def _tokens_complaint(call: dict[str, Any], model: nn.Module) -> str:
    """What is wrong with the token ids of a call, or with the mask beside them; "" if nothing is, or there are none."""
    ids, rows = call.get("input_ids"), embedding_rows(model)
    if not isinstance(ids, Tensor) or rows is None:
        return ""
    if ids.dtype not in (torch.int64, torch.int32):
        return f"input_ids are {ids.dtype}, token ids are torch.int64"
    if ids.dim() != 2:
        return f"input_ids have shape {tuple(ids.shape)}, expected [batch, tokens]"
    if not ids.numel():
        return f"input_ids of shape {tuple(ids.shape)} hold no token"
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= rows:
        wrong = low if low < 0 else high
        return f"token {wrong} is outside the vocabulary of {rows}: the tokenizer is another model's"
    mask = call.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape != ids.shape:
        return f"attention_mask has shape {tuple(mask.shape)}, input_ids {tuple(ids.shape)}"
    return ""
