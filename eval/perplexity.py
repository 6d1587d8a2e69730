"""How far language models are from a reference on a text: perplexity, KL divergence and agreement, token by token.

Windows of L tokens, `stride` S apart; a window scores its last S tokens (the first one all that have a predecessor), so
S = L is the non-overlapping protocol and S < L the sliding one, where every token has at least L - S tokens before it.
Every window begins with the start token where the tokenizer puts one in front of texts. The protocol stands in the name
of every score (`ppl[512/256]` is L = 512, S = 256), because numbers of different protocols do not compare.

    ppl        exp(mean of -log q(t))                 q: the candidate's probabilities, t: the text's tokens
    nll-diff   mean of log p(t) - log q(t)            p: the reference's; the log of the ratio of perplexities
    kl         mean of sum_v p_v (log p_v - log q_v)  KL(reference || candidate), natural logarithm
    top1       share of tokens where argmax q = argmax p

Standard errors treat windows as independent (tokens within one are not): with the sums s_w and counts n_w of W windows
and their mean m, `se^2 = W / (W - 1) * sum_w (s_w - m n_w)^2 / (sum_w n_w)^2`; of ppl, ppl times that of its logarithm.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from dq import checks
from dq.eval import environment
from dq.eval.result import clean
from dq.linear import layer_info
from dq.registry import DQError
from dq.tokens import check_vocabulary, start_token, tokenize, windows

ROWS = 256  # tokens whose probabilities are in memory at once: 50 MB each for a vocabulary of 50,000
CACHE_BYTES = 2 * 2**30  # of reference logits that are kept for further candidates


@dataclass(frozen=True)
class TextScore:
    """One number over `tokens` scored tokens with its standard error (None for a single window); `sums` are those of
    the tokens of every window, by which candidates can be compared pair by pair."""

    value: float
    se: float | None
    tokens: int
    sums: tuple[float, ...] = field(default=(), repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.value:.4g}" + ("" if self.se is None else f" ±{self.se:.2g}")


@dataclass
class TextResult:
    """Scores by candidate (the reference first, as "reference"), protocol in their names; JSON-clean by `to_dict`."""

    scores: dict[str, dict[str, TextScore]]
    settings: dict[str, Any]
    environment: dict[str, Any] = field(default_factory=dict)
    kernels: dict[str, dict[str, int]] = field(default_factory=dict)  # candidate -> kernel and grid -> layers

    def __getitem__(self, name: str) -> dict[str, TextScore]:
        if name not in self.scores:
            raise DQError(f"no candidate {name!r}; there are {', '.join(self.scores)}")
        return self.scores[name]

    def table(self) -> str:
        """One line per candidate, value ± standard error."""
        names = list(dict.fromkeys(k for row in self.scores.values() for k in row))
        lines = [["candidate", *names]]
        lines += [[n, *(str(row[k]) if k in row else "-" for k in names)] for n, row in self.scores.items()]
        wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ["  ".join(map(str.ljust, line, wide)).rstrip() for line in lines]
        for name, ran in self.kernels.items():
            text += [f"{name}: " + "; ".join(f"{count} layers on {kernel}" for kernel, count in ran.items())]
        return "\n".join(text)

    def beside(self, other: TextResult) -> TextResult:
        """Both results of the same candidates as one."""
        names = list(dict.fromkeys([*self.scores, *other.scores]))
        scores = {n: self.scores.get(n, {}) | other.scores.get(n, {}) for n in names}
        environment = self.environment or other.environment
        return TextResult(scores, self.settings | other.settings, environment, self.kernels | other.kernels)

    def to_dict(self) -> dict[str, Any]:
        names = ("scores", "settings", "environment", "kernels")
        return clean({name: getattr(self, name) for name in names})

    def save(self, path: str | Path) -> Path:
        """Writes the numbers as .json; raises DQError for another suffix or a place that cannot be written to."""
        path = checks.output_file(path, (".json",))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        return path


def evaluate_text(
    candidates: Any,
    reference: nn.Module | None,
    text: str | Iterable[str],
    tokenizer: Any,
    *,
    length: int = 2048,
    stride: int | None = None,
    limit: int | None = None,
    progress: bool = True,
) -> TextResult:
    """Measures candidates on a text, beside the reference.

    Args:
        candidates: a model, or a dict name -> model or function without arguments, called when its turn comes.
        reference: the 16-bit model; None gives perplexities alone.
        text: one text, or several that follow each other.
        length, stride: of the windows, see above; stride None is `length`.
        limit: use only the first windows.

    Raises:
        DQError: an empty text, or one shorter than a window; no tokenizer, or another model's; a candidate that is the
            reference; numbers of the wrong type or range; logits with NaN or Inf (names candidate and window).
    """
    named = candidates if isinstance(candidates, Mapping) else {"candidate": candidates}
    if not named or "reference" in named:
        raise DQError("evaluate_text takes a model or a dict name -> model, none of them called 'reference'")
    scorer = TextScorer(reference, text, tokenizer, length=length, stride=stride, limit=limit)
    total = scorer.windows * (len(named) + (reference is not None))
    scores, kernels = {}, {}
    with tqdm(total=total, desc="scoring", unit="window", disable=not progress) as bar:
        if reference is not None:
            scores["reference"] = scorer.reference_scores(bar.update)
        for name, candidate in named.items():
            model = candidate if isinstance(candidate, nn.Module) else _open(candidate, str(name))
            scores[str(name)] = scorer.score(model, str(name), bar.update)
            if ran := _kernels(model):
                kernels[str(name)] = ran
            del model
    device = None if reference is None else next(reference.parameters()).device
    return TextResult(scores, scorer.settings(), environment.describe(device), kernels)


def _kernels(model: nn.Module) -> dict[str, int]:
    """What ran the quantized linears: kernel, activation grid, and what plain torch did -> layers."""
    rows = [i for i in layer_info(model) if i.calls]
    return dict(Counter(f"{i.backend} ({i.grid}{'; input by torch' if i.in_torch else ''})" for i in rows))


class TextScorer:
    """Scores models one by one on the same windows of a text, beside one reference; see `evaluate_text`.

    Args:
        batch: windows in one call of a model: a GPU is then kept busy by small models. Scores do not depend on it
            where models treat the sequences of a batch apart; a grid with one scale for a whole activation does not.
    """

    def __init__(
        self,
        reference: nn.Module | None,
        text: str | Iterable[str],
        tokenizer: Any,
        *,
        length: int = 2048,
        stride: int | None = None,
        limit: int | None = None,
        batch: int = 1,
    ):
        self._protocol = _Protocol.of(text, tokenizer, length, stride, limit)
        self._protocol.batch = checks.whole(batch, "batch")
        self._base = _Reference(reference)

    @property
    def windows(self) -> int:
        return len(self._protocol.windows)

    def settings(self) -> dict[str, Any]:
        """The protocol, JSON-clean."""
        return self._protocol.settings()

    @torch.no_grad()
    def reference_scores(self, tick: Callable[[int], Any] = int) -> dict[str, TextScore]:
        """Of the reference itself; its logits are kept for the candidates while memory allows."""
        return self._protocol.measure("reference", self._base.model, _Reference(None), tick, self._base.keep)

    @torch.no_grad()
    def score(
        self, model: nn.Module, name: str = "candidate", tick: Callable[[int], Any] = int
    ) -> dict[str, TextScore]:
        """All scores of one model; `tick(1)` after every window.

        Raises:
            DQError: the model is the reference, or gives NaN or Inf.
        """
        if model is self._base.model:
            raise DQError(f"{name} is the reference itself; quantize works in place: load the reference anew")
        return self._protocol.measure(name, model, self._base, tick)


def _open(candidate: Any, name: str) -> nn.Module:
    model = candidate() if callable(candidate) else candidate
    if not isinstance(model, nn.Module):
        raise DQError(f"{name} is no model but a {type(model).__name__}")
    return model


class _Reference:
    """The logits of the reference, window by window: kept while memory allows, else computed again."""

    def __init__(self, model: nn.Module | None):
        self.model, self._kept, self._bytes = model, {}, 0

    def keep(self, index: int, logits: Tensor) -> None:
        room = CACHE_BYTES
        if logits.is_cuda:  # kept where they are, in at most a quarter of what was free
            room = (torch.cuda.mem_get_info(logits.device)[0] + self._bytes) // 4
        if self._bytes + logits.nbytes <= room:
            kept = logits.clone() if logits.is_cuda else logits.cpu()
            self._kept[index], self._bytes = kept, self._bytes + logits.nbytes

    def logits(self, index: int, ids: Tensor) -> Tensor | None:
        if self.model is None:
            return None
        return self._kept[index] if index in self._kept else _logits(self.model, ids[None], "reference", index)[0]


@dataclass
class _Protocol:
    """Windows [W, L] of a text, and which of their tokens count."""

    windows: Tensor
    length: int
    stride: int
    start: int | None
    batch: int = 1

    @classmethod
    def of(cls, text: Any, tokenizer: Any, length: int, stride: int | None, limit: int | None) -> _Protocol:
        length = checks.whole(length, "length", 2)
        start = start_token(tokenizer) if callable(tokenizer) else None
        body = length - (start is not None)
        step = body if stride is None or stride == length else checks.whole(stride, "stride", 1, length)
        listed = checks.texts(text, "text", "evaluate_text got no text")
        found = windows(tokenize(listed, tokenizer), length, min(step, body), start)
        found = found if limit is None else found[: checks.whole(limit, "limit")]
        return cls(found, length, min(step, body), start)

    @property
    def name(self) -> str:
        """`512/256` for the sliding protocol, `512` for the other, `+bos` where a start token was put in front."""
        overlap = self.stride < self.length - (self.start is not None)
        return f"{self.length}{f'/{self.stride}' if overlap else ''}{'+bos' if self.start is not None else ''}"

    def first(self, index: int) -> int:
        """Place in window `index` of the first token that counts."""
        return 1 if index == 0 else max(1, self.length - self.stride)

    def settings(self) -> dict[str, Any]:
        tokens = sum(self.length - self.first(i) for i in range(len(self.windows)))
        kind = {"protocol": self.name, "length": self.length, "stride": self.stride, "start_token": self.start}
        return kind | {"windows": len(self.windows), "scored_tokens": tokens}

    def measure(
        self,
        name: str,
        model: nn.Module,
        base: _Reference,
        tick: Callable[[int], Any],
        keep: Callable[[int, Tensor], None] | None = None,
    ) -> dict[str, TextScore]:
        """All scores of one model."""
        check_vocabulary(self.windows, model)
        sums = []
        for begin in range(0, len(self.windows), self.batch):
            some = self.windows[begin : begin + self.batch]
            for i, (ids, logits) in enumerate(zip(some, _logits(model, some, name, begin), strict=True), begin):
                if keep is not None:
                    keep(i, logits)
                other = base.logits(i, ids)
                if other is not None and other.shape != logits.shape:
                    what = f"the reference predicts {other.shape[-1]} tokens, {name} {logits.shape[-1]}"
                    raise DQError(f"{what}: it is another model's reference")
                sums.append(_window(logits, other, ids, self.first(i)))
                tick(1)
        found = {key: _mean([s[key] for s in sums], [int(s["tokens"]) for s in sums]) for key in sums[0]}
        nll = found.pop("nll")
        ppl = math.exp(min(nll.value, 700.0))
        out = {"ppl": TextScore(ppl, None if nll.se is None else ppl * nll.se, nll.tokens)}
        out |= {k: v for k, v in found.items() if k != "tokens"}
        return {f"{k}[{self.name}]": v for k, v in out.items()}


def _logits(model: nn.Module, ids: Tensor, name: str, first: int) -> Tensor:
    """[B, L, V] of windows [B, L], of which `first` is the number of the first one, in the model's dtype."""
    device = next(iter(model.parameters())).device
    found = model(input_ids=ids.to(device), use_cache=False).logits
    for index, one in enumerate(found, first):
        if not torch.isfinite(one).all():
            raise DQError(f"{name} gave NaN or Inf in window {index}; check the 16-bit model (a float16 overflow?)")
    return found


def _window(logits: Tensor, base: Tensor | None, ids: Tensor, first: int) -> dict[str, float]:
    """Sums over the tokens `ids[first:]`, a slice at a time, in float32 and summed in float64."""
    sums: dict[str, float] = {"nll": 0.0, "tokens": 0.0}
    for begin in range(first, len(ids), ROWS):
        stop = min(begin + ROWS, len(ids))
        target, rows = ids[begin:stop, None], slice(begin - 1, stop - 1)
        q = logits[rows].float().log_softmax(-1)
        mine = -q.gather(1, target.to(q.device))[:, 0]
        found = {"nll": mine, "tokens": torch.ones_like(mine)}
        if base is not None:
            p = base[rows].to(q.device, torch.float32).log_softmax(-1)
            found["nll-diff"] = mine + p.gather(1, target.to(q.device))[:, 0]
            found["kl"] = (p.exp() * (p - q)).sum(-1)
            found["top1"] = (p.argmax(-1) == q.argmax(-1)).float()
        for key, value in found.items():
            sums[key] = sums.get(key, 0.0) + float(value.double().sum())
    return sums


def _mean(sums: list[float], counts: list[int]) -> TextScore:
    """The mean over all tokens, and its standard error over windows."""
    total, n = sum(counts), len(counts)
    mean = sum(sums) / total
    if n < 2:
        return TextScore(mean, None, total, tuple(sums))
    spread = sum((s - mean * c) ** 2 for s, c in zip(sums, counts, strict=True))
    return TextScore(mean, math.sqrt(n / (n - 1) * spread) / total, total, tuple(sums))


def ratio(sums: Sequence[float], others: Sequence[float]) -> tuple[float, float | None]:
    """Mean of one candidate over that of another, and its standard error (None for a single window): both saw the same
    windows, and what is hard for both moves the ratio little. By linearisation, `sum(a - r b)^2` over windows."""
    n, below = len(sums), sum(others)
    found = sum(sums) / below
    if n < 2:
        return found, None
    spread = sum((a - found * b) ** 2 for a, b in zip(sums, others, strict=True))
    return found, math.sqrt(n / (n - 1) * spread) / abs(below)


def bits(model: nn.Module) -> float | None:
    """Stored bits per weight over all quantized linears, everything counted; None if there is none."""
    layers = layer_info(model)
    weights = sum(x.shape[0] * x.shape[1] for x in layers)
    return 8.0 * sum(x.nbytes for x in layers) / weights if weights else None
