"""FLUX.1 (diffusers `FluxTransformer2DModel`, dev, schnell, Kontext, Fill) and models of the same blocks: double and
single ones.

Single blocks feed one normalised input to q, k, v and proj_mlp; their proj_out reads [attention | GELU(mlp)], two
parts with their own smoothing factors. q, k, v share the low-rank down factor, proj_mlp keeps its own. to_out.0 and
to_add_out have different inputs but one channel basis (the heads of joint attention), so they share smoothing factors.
Rows of norm1.linear: shift, scale, gate of the attention, then of the MLP; of a single block's norm.linear: one three.
proj_out and ff.net.2 read a GELU, which nothing can be folded through.
Source: the groups of SVDQuant's reference implementation for FLUX.1.
"""

from dq.family import FAMILIES, Family, Fold
from dq.pipelines.families.common import ADDED, OUT, QKV, two_streams, under

_BLOCK, _SINGLE = "transformer_blocks.*", "single_transformer_blocks.*"
_QKV, _ADDED = under(f"{_BLOCK}.attn", *QKV), under(f"{_BLOCK}.attn", *ADDED)
_SINGLE_QKV = under(f"{_SINGLE}.attn", *QKV)
_SINGLE_IN = (*_SINGLE_QKV, f"{_SINGLE}.proj_mlp")
GROUPS = dict(
    blocks=(_BLOCK, _SINGLE),
    inputs=(_QKV, _ADDED, _SINGLE_IN),
    smooth=(under(f"{_BLOCK}.attn", *OUT),),
    lowrank=(_QKV, _ADDED, _SINGLE_QKV),
    k_parts=((f"{_SINGLE}.proj_out", (f"{_SINGLE}.attn.to_v", f"{_SINGLE}.proj_mlp")),),
)
FOLDS = (
    *two_streams(_BLOCK, ("norm1.linear", "norm1_context.linear"), ("ff.net.0.proj", "ff_context.net.0.proj")),
    Fold("modulation", _SINGLE_IN, (f"{_SINGLE}.norm.linear",), 3, (0, 1)),
)

FAMILIES.register(
    Family(
        name="flux.1",
        classes=(
            "FluxTransformer2DModel",
            "BriaTransformer2DModel",
            "BriaFiboTransformer2DModel",
            "LongCatImageTransformer2DModel",
        ),
        folds=FOLDS,
        **GROUPS,
    )
)
