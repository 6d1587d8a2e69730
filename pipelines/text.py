"""`Text`: windows of tokens as calibration records of a language model or text encoder."""

from __future__ import annotations

import hashlib
import inspect
import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dq.checks import line, texts, whole
from dq.checks import seed as checked_seed
from dq.records import Record, digest
from dq.registry import DQError
from dq.tokens import check_vocabulary, start_token, tokenize, windows

_NO_TEXT = "calibration got no text: pass a list of texts, or None for a data-free recipe"


class Text:
    """Calibration by text.

    All texts are tokenized one after the other and cut into windows of `length` tokens, of which `samples` are drawn
    with `seed`: the same call gives the same windows. Where the tokenizer puts a start token in front of a text, every
    window begins with it.

    Args:
        texts: a list, a generator, or one string.
        tokenizer: the model's own.
        samples: windows; fewer, with a warning, if the text is shorter.
        length: tokens of each.
        seed: of the draw.

    Attributes:
        ids: int64 [samples, length].

    Raises:
        DQError: no text, a text too short for one window, no tokenizer, or a number of the wrong type or range.
    """

    def __init__(
        self, texts_: str | Iterable[str], tokenizer: Any, *, samples: int = 128, length: int = 2048, seed: int = 0
    ):
        self.texts = texts(texts_, "calibration texts", _NO_TEXT)
        self.length, samples = whole(length, "length", 2), whole(samples, "samples")
        self.seed = checked_seed(seed)
        ids = tokenize(self.texts, tokenizer, "calibration text")
        self.start = start_token(tokenizer)
        found = windows(ids, self.length, None, self.start)
        if len(found) < samples:
            short = f"the calibration text fills {len(found)} windows of {length} tokens, not {samples}: all are used"
            warnings.warn(short, stacklevel=2)
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(self.seed))
        self.ids: Tensor = found[order[:samples].sort().values]

    def __repr__(self) -> str:
        return f"Text({len(self.ids)} windows of {self.length} tokens)"

    @classmethod
    def from_file(cls, path: str | Path, tokenizer: Any, **kwargs: Any) -> Text:
        """All of a UTF-8 file as one text.

        Raises:
            DQError: the file cannot be read, is empty or no text; and as the class.
        """
        return cls([read_text(path)], tokenizer, **kwargs)

    def collect(self, model: nn.Module) -> list[Record]:
        """One record per window, a call of `model` by keywords.

        Raises:
            DQError: a model that takes no token ids, or a tokenizer of another model.
        """
        known = inspect.signature(model.forward).parameters
        if "input_ids" not in known:
            raise DQError(f"dq.Text calibrates models that read tokens; {type(model).__name__} takes no input_ids")
        check_vocabulary(self.ids, model)
        extra = {"use_cache": False} if "use_cache" in known else {}
        return [Record((), {"input_ids": row[None], **extra}, prompt=i) for i, row in enumerate(self.ids)]

    def describe(self) -> dict[str, Any]:
        """JSON-clean account of the settings; texts as a count and a hash, tokens as a hash."""
        return {
            "texts": len(self.texts),
            "sha256": hashlib.sha256(json.dumps(self.texts).encode()).hexdigest(),
            "samples": len(self.ids),
            "length": self.length,
            "start": self.start,
            "seed": self.seed,
            "tokens_sha256": digest(self.ids),
        }


def read_text(path: str | Path) -> str:
    """A UTF-8 file, with or without a byte order mark.

    Raises:
        DQError: it cannot be read, or is no text.
    """
    try:
        found = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DQError(f"cannot read text from {path}: it is no UTF-8 text; save it as UTF-8") from error
    except (OSError, TypeError, ValueError) as error:
        raise DQError(f"cannot read text from {path}: {line(error)}") from error
    if "\0" in found:
        raise DQError(f"{path} holds binary data, no text")
    if not found.strip():
        raise DQError(f"{path} is empty: it holds no text")
    return found
