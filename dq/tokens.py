"""Texts as windows of token ids, for calibration and evaluation alike. Tokenizers are duck-typed: no library here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dq.registry import DQError


def tokenize(texts: Sequence[str], tokenizer: Any, what: str = "the text") -> Tensor:
    """int64 [n]: the ids of all texts one after the other, without special tokens.

    Raises:
        DQError: no text at all, no tokenizer, or one that fails or gives nothing.
    """
    if not any(text.strip() for text in texts):
        raise DQError(f"{what} is empty: give it some sentences")
    if not callable(tokenizer):
        got = "None" if tokenizer is None else type(tokenizer).__name__
        raise DQError(f"{what} needs the model's tokenizer (AutoTokenizer.from_pretrained(...)), got {got}")
    ids: list[int] = []
    for text in texts:
        try:
            # `verbose` only says that a text is longer than the model's context, which windows are not.
            ids += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        except (TypeError, KeyError, ValueError) as error:
            problem = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DQError(f"{type(tokenizer).__name__} is no tokenizer of texts: {problem}") from error
    if not ids:
        raise DQError(f"{what} gave no token")
    return torch.tensor(ids, dtype=torch.int64)


def start_token(tokenizer: Any) -> int | None:
    """The id that the tokenizer itself puts in front of a text (Llama and Gemma do, Qwen and GPT do not), or None.

    Models that were trained with it are far off without it, so that every window begins with it.
    """
    first = getattr(tokenizer, "bos_token_id", None)
    if first is None or tokenizer("a", verbose=False)["input_ids"][:1] != [first]:
        return None
    return int(first)


def windows(ids: Tensor, length: int, stride: int | None = None, start: int | None = None) -> Tensor:
    """int64 [windows, length]: runs of the text `stride` apart (default: as long as they are), each behind `start`. The
    rest of the text that fills no window is left out.

    Raises:
        DQError: the text does not fill one window.
    """
    body = length - (start is not None)
    if len(ids) < body:
        raise DQError(f"the text has {len(ids)} tokens, one window needs {body}: give more text or a smaller length")
    found = ids.unfold(0, body, body if stride is None else stride)
    if start is None:
        return found.contiguous()
    return torch.cat([found.new_full((len(found), 1), start), found], 1)


def embedding_rows(model: Any) -> int | None:
    """Ids that the model has an embedding for, or None if it says nothing about it."""
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    return getattr(getattr(embedding, "weight", None), "shape", (None,))[0]


def check_vocabulary(ids: Tensor, model: Any) -> None:
    """Raises DQError for ids [.., L] that the model has no embedding for (the tokenizer belongs to another model), and
    for more of them in a row than it has positions for."""
    config = getattr(model, "config", None)
    config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    context = getattr(config, "max_position_embeddings", None)
    if isinstance(context, int) and 0 < context < ids.shape[-1]:
        raise DQError(
            f"windows of {ids.shape[-1]} tokens are longer than the {context} positions of {type(model).__name__}: "
            f"take length={context} (in the shell --length {context})"
        )
    rows = embedding_rows(model)
    if rows is not None and int(ids.max()) >= rows:
        raise DQError(
            f"token {int(ids.max())} is beyond the {rows} of {type(model).__name__}: the tokenizer is another model's"
        )
