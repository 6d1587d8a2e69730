"""FLUX.1 (diffusers `FluxTransformer2DModel`, dev, schnell, Kontext, Fill): double and single blocks.

Single blocks feed one normalised input to q, k, v and proj_mlp; their proj_out reads [attention | GELU(mlp)], two
parts with their own smoothing factors. q, k, v share the low-rank down factor, proj_mlp keeps its own. to_out.0 and
to_add_out have different inputs but one channel basis (the heads of joint attention), so they share smoothing factors.
Source: the groups of SVDQuant's reference implementation for FLUX.1.
"""

from dq.family import FAMILIES, Family

_DOUBLE, _SINGLE = "transformer_blocks.*.attn", "single_transformer_blocks.*"
_QKV = tuple(f"{_DOUBLE}.{n}" for n in ("to_q", "to_k", "to_v"))
_ADDED = tuple(f"{_DOUBLE}.{n}" for n in ("add_q_proj", "add_k_proj", "add_v_proj"))
_SINGLE_QKV = tuple(f"{_SINGLE}.attn.{n}" for n in ("to_q", "to_k", "to_v"))

FAMILIES.register(
    Family(
        name="flux.1",
        classes=("FluxTransformer2DModel",),
        blocks=("transformer_blocks.*", "single_transformer_blocks.*"),
        inputs=(_QKV, _ADDED, (*_SINGLE_QKV, f"{_SINGLE}.proj_mlp")),
        smooth=((f"{_DOUBLE}.to_out.0", f"{_DOUBLE}.to_add_out"),),
        lowrank=(_QKV, _ADDED, _SINGLE_QKV),
        k_parts=((f"{_SINGLE}.proj_out", (f"{_SINGLE}.attn.to_v", f"{_SINGLE}.proj_mlp")),),
    )
)
