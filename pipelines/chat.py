"""One turn of a conversation with a language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import TextStreamer

from dq.pipelines.kv_cache import KVCache, cache_argument
from dq.registry import DQError


def no_nan(ids: Tensor, scores: Tensor) -> Tensor:
    """A logits processor of `generate` that changes nothing.

    Raises:
        DQError: the model gave NaN, of which `generate` makes the first token of the vocabulary.
    """
    if scores.isnan().any():
        raise DQError("the model gave NaN in place of a token: dq inspect --values looks for it in the files")
    return scores


def answer(
    model: nn.Module,
    tokenizer: Any,
    said: Sequence[dict[str, str]],
    *,
    tokens: int = 256,
    sample: bool = False,
    kv_cache: str | None = None,
) -> str:
    """Prints the answer as it comes, and returns it.

    Args:
        said: the conversation so far as {role, content}, the question last; the tokenizer has a template for it.
        tokens: most of the answer.
        sample: draw tokens as the model's generation settings say; else the likeliest.
        kv_cache: name of a `dq.KVCache`.
    """
    given = tokenizer.apply_chat_template(list(said), add_generation_prompt=True, return_tensors="pt", return_dict=True)
    given = {k: t.to(model.device) for k, t in given.items() if k in ("input_ids", "attention_mask")}
    start = given["input_ids"].shape[1]
    if kv_cache is not None:
        given[cache_argument(model)] = KVCache(kv_cache, config=model.config)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    how = {} if sample else {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    ids = model.generate(**given, **how, max_new_tokens=tokens, streamer=streamer, logits_processor=[no_nan])[0]
    return tokenizer.decode(ids[start:], skip_special_tokens=True)
