"""Architectures whose original names differ from diffusers' in little: Z-Image, Qwen-Image, LTX-Video."""

from dq.pipelines.naming import NAMINGS, Naming, Rule, renames

_Z = tuple(
    rule
    for block in ("layers.*", "noise_refiner.*", "context_refiner.*")
    for rule in (
        Rule(f"{block}.attention.qkv", tuple(f"{block}.attention.{n}" for n in ("to_q", "to_k", "to_v"))),
        *renames({
            f"{block}.attention.out": f"{block}.attention.to_out.0",
            f"{block}.attention.q_norm": f"{block}.attention.norm_q",
            f"{block}.attention.k_norm": f"{block}.attention.norm_k",
        }),
    )
)  # fmt: skip
_Z_ENDS = renames({"final_layer.linear": "all_final_layer.2-1.linear", "x_embedder": "all_x_embedder.2-1",
                   "final_layer.adaLN_modulation.1": "all_final_layer.2-1.adaLN_modulation.1"})  # fmt: skip
NAMINGS.register(Naming("z-image", ("ZImageTransformer2DModel",), _Z + _Z_ENDS, rest=True))

NAMINGS.register(Naming("qwen-image", ("QwenImageTransformer2DModel",), (), rest=True))

_LTX = renames({
    "patchify_proj": "proj_in",
    "adaln_single.linear": "time_embed.linear",
    "adaln_single.emb.timestep_embedder.linear_1": "time_embed.emb.timestep_embedder.linear_1",
    "adaln_single.emb.timestep_embedder.linear_2": "time_embed.emb.timestep_embedder.linear_2",
    **{f"transformer_blocks.*.{a}.{t}": f"transformer_blocks.*.{a}.{h}"
       for a in ("attn1", "attn2") for t, h in (("q_norm", "norm_q"), ("k_norm", "norm_k"))},
})  # fmt: skip
NAMINGS.register(Naming("ltx", ("LTXVideoTransformer3DModel",), _LTX, rest=True))
