"""Stable Diffusion 3 and 3.5 (diffusers `SD3Transformer2DModel`).

Blocks with two attentions (3.5 medium) make nine chunks in norm1.linear, the others six: shift, scale, gate of the
first attention, of the MLP, and of the second one, which attends within the image and is quantized like the first.
The text stream of the last block has neither output nor MLP; its norm1_context makes two chunks, scale before shift.
ff.net.2 reads a GELU, which nothing can be folded through.
"""

from dq.family import FAMILIES, HIGH_PRECISION, Family, Fold
from dq.pipelines.families.common import ADDED, OUT, QKV, two_streams, under, values

_BLOCK = "transformer_blocks.*"
_QKV, _ADDED, _DUAL = (
    under(f"{_BLOCK}.{a}", *n) for a, n in (("attn", QKV), ("attn", ADDED), ("attn2", QKV))
)  # fmt: skip
_NORM = (f"{_BLOCK}.norm1.linear",)

FAMILIES.register(
    Family(
        name="sd3",
        classes=("SD3Transformer2DModel",),
        blocks=(_BLOCK,),
        inputs=(_QKV, _ADDED, _DUAL),
        smooth=(under(f"{_BLOCK}.attn", *OUT),),
        lowrank=(_QKV, _ADDED, _DUAL),
        high_precision=tuple(rule for rule in HIGH_PRECISION if "attn2" not in rule[0]),
        folds=(
            *two_streams(_BLOCK, ("norm1.linear", "norm1_context.linear"), ("ff.net.0.proj", "ff_context.net.0.proj")),
            Fold("modulation", _QKV, _NORM, 9, (0, 1)),
            Fold("modulation", (f"{_BLOCK}.ff.net.0.proj",), _NORM, 9, (3, 4)),
            Fold("modulation", _DUAL, _NORM, 9, (6, 7)),
            Fold("modulation", _ADDED, (f"{_BLOCK}.norm1_context.linear",), 2, (1, 0)),
            values(f"{_BLOCK}.attn2"),
        ),
    )
)
