"""`Case`: one tiny model and what it is called with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


class Draw:
    """Random inputs; sample i of a batch is the same whatever the batch size."""

    def __init__(self, batch: int, seed: int, dtype: torch.dtype):
        self.batch, self.dtype = batch, dtype
        self._generators = [torch.Generator().manual_seed(seed + i) for i in range(batch)]

    def rows(self, *shape: int) -> list[Tensor]:
        """One tensor per sample, normally distributed."""
        return [torch.randn(shape, generator=g).to(self.dtype) for g in self._generators]

    def x(self, *shape: int) -> Tensor:
        """[batch, *shape], normally distributed."""
        return torch.stack(self.rows(*shape))

    def t(self, value: float, dtype: torch.dtype | None = None) -> Tensor:
        """[batch] of one value."""
        return torch.full((self.batch,), value, dtype=dtype or self.dtype)

    def ones(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """[batch, *shape], a mask that hides nothing."""
        return torch.ones(self.batch, *shape, dtype=dtype or self.dtype)

    def ids(self, length: int, axes: int = 3) -> Tensor:
        """[length, axes] positions on a square; the text has length-many zeros."""
        out, side = torch.zeros(length, axes, dtype=self.dtype), int(length**0.5)
        out[:, 1], out[:, 2] = torch.arange(length) // side, torch.arange(length) % side
        return out


@dataclass(frozen=True)
class Case:
    """One model class of diffusers in a tiny configuration.

    Attributes:
        name: of the class, or `<class>@<variant>`.
        config: what the class is built from.
        draw: its inputs.
    """

    name: str
    config: dict[str, Any] = field(hash=False)
    draw: Callable[[Draw], dict[str, Any]] = field(hash=False)

    @property
    def cls(self) -> type[nn.Module]:
        import diffusers

        return getattr(diffusers, self.name.partition("@")[0])

    def build(self, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> nn.Module:
        """The model in eval mode: weights of std 1/sqrt(K), biases and tables of .1, norm weights around 1."""
        torch.manual_seed(seed)
        model = self.cls(**self.config | changes)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.dim() == 1 and name.endswith("weight"):
                    p.normal_(1, 0.1)
                elif p.dim() < 2 or "table" in name or "embed" in name.rpartition(".")[2]:
                    p.normal_(0, 0.1)
                else:
                    p.normal_(0, p[0].numel() ** -0.5)
        for p in model.parameters():  # buffers such as rotary frequencies keep their dtype, as `from_pretrained` does
            p.data = p.data.to(dtype)
        return model.eval()

    def inputs(self, dtype: torch.dtype = torch.float32, batch: int = 1, seed: int = 0) -> dict[str, Any]:
        """Keyword arguments of one call."""
        inputs = self.draw(Draw(batch, seed, dtype))
        known = inspect.signature(self.cls.forward).parameters
        return inputs | ({"return_dict": False} if "return_dict" in known else {})
