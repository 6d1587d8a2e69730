"""FLUX.1 (diffusers `FluxTransformer2DModel`, dev, schnell, Kontext, Fill): double and single blocks.

Single blocks feed one normalised input to q, k, v and proj_mlp; their proj_out reads [attention | GELU(mlp)], two
parts with their own smoothing factors. q, k, v share the low-rank down factor, proj_mlp keeps its own. to_out.0 and
to_add_out have different inputs but one channel basis (the heads of joint attention), so they share smoothing factors.
Rows of norm1.linear: shift, scale, gate of the attention, then of the MLP; of a single block's norm.linear: one three.
proj_out and ff.net.2 read a GELU, which nothing can be folded through.
Source: the groups of SVDQuant's reference implementation for FLUX.1.
"""

from dq.family import FAMILIES, Family, Fold

_BLOCK, _SINGLE = "transformer_blocks.*", "single_transformer_blocks.*"
_DOUBLE = f"{_BLOCK}.attn"
_QKV = tuple(f"{_DOUBLE}.{n}" for n in ("to_q", "to_k", "to_v"))
_ADDED = tuple(f"{_DOUBLE}.{n}" for n in ("add_q_proj", "add_k_proj", "add_v_proj"))
_SINGLE_QKV = tuple(f"{_SINGLE}.attn.{n}" for n in ("to_q", "to_k", "to_v"))
_OUT = (f"{_DOUBLE}.to_out.0", f"{_DOUBLE}.to_add_out")
_FOLDS = (
    Fold("modulation", _QKV, (f"{_BLOCK}.norm1.linear",), 6, (0, 1)),
    Fold("modulation", (f"{_BLOCK}.ff.net.0.proj",), (f"{_BLOCK}.norm1.linear",), 6, (3, 4)),
    Fold("modulation", _ADDED, (f"{_BLOCK}.norm1_context.linear",), 6, (0, 1)),
    Fold("modulation", (f"{_BLOCK}.ff_context.net.0.proj",), (f"{_BLOCK}.norm1_context.linear",), 6, (3, 4)),
    Fold("modulation", (*_SINGLE_QKV, f"{_SINGLE}.proj_mlp"), (f"{_SINGLE}.norm.linear",), 3, (0, 1)),
    Fold("rows", _OUT, (f"{_DOUBLE}.to_v", f"{_DOUBLE}.add_v_proj")),
)

FAMILIES.register(
    Family(
        name="flux.1",
        classes=("FluxTransformer2DModel",),
        blocks=("transformer_blocks.*", "single_transformer_blocks.*"),
        inputs=(_QKV, _ADDED, (*_SINGLE_QKV, f"{_SINGLE}.proj_mlp")),
        smooth=(_OUT,),
        lowrank=(_QKV, _ADDED, _SINGLE_QKV),
        folds=_FOLDS,
        k_parts=((f"{_SINGLE}.proj_out", (f"{_SINGLE}.attn.to_v", f"{_SINGLE}.proj_mlp")),),
    )
)
