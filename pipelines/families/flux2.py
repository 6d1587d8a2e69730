"""FLUX.2 (diffusers `Flux2Transformer2DModel`): no biases, modulations that all blocks share, fused linears.

Rows of a single block's to_qkv_mlp_proj are q, k, v (D each), gate and linear half of a SwiGLU (3 D each); its to_out
reads [attention D | SwiGLU 3 D], whose factors therefore fold into the rows of v and of the linear half: chunks 2 and
6, 7, 8 of nine. Of ff.linear_in the second half is the linear one. The shared modulations belong to no single factor.
One low-rank branch serves all rows of the fused linear: its automatic rank of K/96 = 64 holds what 32 for q, k, v and
32 for the rest could, since a pair of such branches is one of rank 64.
"""

from dq.family import FAMILIES, Family, Fold
from dq.pipelines.families.common import ADDED, OUT, QKV, under, values

_BLOCK, _SINGLE = "transformer_blocks.*", "single_transformer_blocks.*.attn"
_QKV, _ADDED = under(f"{_BLOCK}.attn", *QKV), under(f"{_BLOCK}.attn", *ADDED)

FAMILIES.register(
    Family(
        name="flux.2",
        classes=("Flux2Transformer2DModel",),
        blocks=(_BLOCK, "single_transformer_blocks.*"),
        inputs=(_QKV, _ADDED),
        smooth=(under(f"{_BLOCK}.attn", *OUT),),
        lowrank=(_QKV, _ADDED),
        k_parts=((f"{_SINGLE}.to_out", (f"{_SINGLE}.to_out", "...")),),
        folds=(
            values(f"{_BLOCK}.attn", text=True),
            Fold("rows", (f"{_BLOCK}.ff.linear_out",), (f"{_BLOCK}.ff.linear_in",), 2, (1,)),
            Fold("rows", (f"{_BLOCK}.ff_context.linear_out",), (f"{_BLOCK}.ff_context.linear_in",), 2, (1,)),
            Fold("rows", (f"{_SINGLE}.to_out",), (f"{_SINGLE}.to_qkv_mlp_proj",), 9, (2, 6, 7, 8)),
        ),
    )
)
