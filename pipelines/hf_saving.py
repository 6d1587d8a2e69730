"""What a transformers model says of a quantization while it is saved. Imported by dq.pipelines.hook.

A configuration may be that of several models, and a model may hold parts that were quantized by themselves, before or
after they were put there, or through a wrapper. So what is saved is found out when it is saved.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dq.linear import quantized_linears
from dq.pipelines.hf_transformers import DQTransformersConfig, DQTransformersQuantizer, describe, detach
from dq.pipelines.hook import complete
from dq.pipelines.own_config import within

_MISSING = object()


@contextmanager
def described(model: Any) -> Iterator[None]:
    """Meanwhile the configuration of a model describes its quantized linears, or none if it has none, whichever model
    it described before; that of a model quantized by another library stays."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not isinstance(quantizer, DQTransformersQuantizer):
        yield
        return
    quantized = bool(quantized_linears(model))
    if not quantized:
        detach(model)  # parts of it were dequantized by themselves
    configs = list(within(model.config))
    places = [(vars(c), "quantization_config") for c in configs]
    places += [(vars(model), name) for name in ("hf_quantizer", "_weight_conversions")]
    before = [(place, name, place.get(name, _MISSING)) for place, name in places]
    try:
        if quantized:
            describe(model)
        else:
            for config in configs:
                if isinstance(vars(config).get("quantization_config"), DQTransformersConfig):
                    del config.quantization_config
        yield
    finally:
        for place, name, value in before:
            if value is _MISSING:
                place.pop(name, None)
            else:
                place[name] = value


def register(modeling: Any) -> None:
    """Wraps `PreTrainedModel.save_pretrained`, once."""
    original = modeling.PreTrainedModel.save_pretrained
    if hasattr(original, "dq_wrapped"):
        return

    @functools.wraps(original)
    def save_pretrained(self, *args, **kwargs):
        with described(self):
            return original(self, *args, **kwargs)

    save_pretrained.dq_wrapped = True
    modeling.PreTrainedModel.save_pretrained = save_pretrained


complete(__name__)
