"""Stable Diffusion 3 and 3.5 as Stability AI publishes them. The text stream of the last block only modulates.

Its `norm1_context` is diffusers' AdaLayerNormContinuous, so its rows are exchanged like those of the final layer; which
block is the last one is known from the model alone.
"""

from dq.pipelines.naming import NAMINGS, Naming, Rule, renames

_B, _X, _C = "transformer_blocks.*", "joint_blocks.*.x_block", "joint_blocks.*.context_block"
_TIME = "time_text_embed"
_RULES = (
    Rule(f"{_X}.attn.qkv", tuple(f"{_B}.attn.{n}" for n in ("to_q", "to_k", "to_v"))),
    Rule(f"{_C}.attn.qkv", tuple(f"{_B}.attn.{n}" for n in ("add_q_proj", "add_k_proj", "add_v_proj"))),
    Rule(f"{_X}.attn2.qkv", tuple(f"{_B}.attn2.{n}" for n in ("to_q", "to_k", "to_v"))),
    *renames({
        f"{_X}.attn.ln_q": f"{_B}.attn.norm_q",
        f"{_X}.attn.ln_k": f"{_B}.attn.norm_k",
        f"{_C}.attn.ln_q": f"{_B}.attn.norm_added_q",
        f"{_C}.attn.ln_k": f"{_B}.attn.norm_added_k",
        f"{_X}.attn2.ln_q": f"{_B}.attn2.norm_q",
        f"{_X}.attn2.ln_k": f"{_B}.attn2.norm_k",
        f"{_X}.attn.proj": f"{_B}.attn.to_out.0",
        f"{_X}.attn2.proj": f"{_B}.attn2.to_out.0",
        f"{_C}.attn.proj": f"{_B}.attn.to_add_out",
        f"{_X}.adaLN_modulation.1": f"{_B}.norm1.linear",
        f"{_X}.mlp.fc1": f"{_B}.ff.net.0.proj",
        f"{_X}.mlp.fc2": f"{_B}.ff.net.2",
        f"{_C}.mlp.fc1": f"{_B}.ff_context.net.0.proj",
        f"{_C}.mlp.fc2": f"{_B}.ff_context.net.2",
        f"{_C}.adaLN_modulation.1": f"{_B}.norm1_context.linear",
        "pos_embed": "pos_embed.pos_embed",
        "x_embedder.proj": "pos_embed.proj",
        "t_embedder.mlp.0": f"{_TIME}.timestep_embedder.linear_1",
        "t_embedder.mlp.2": f"{_TIME}.timestep_embedder.linear_2",
        "y_embedder.mlp.0": f"{_TIME}.text_embedder.linear_1",
        "y_embedder.mlp.2": f"{_TIME}.text_embedder.linear_2",
        "context_embedder": "context_embedder",
        "final_layer.linear": "proj_out",
    }),
    Rule("final_layer.adaLN_modulation.1", ("norm_out.linear",), swap=True),
)  # fmt: skip

NAMINGS.register(Naming("sd3", ("SD3Transformer2DModel",), _RULES, swap_last=(f"{_B}.norm1_context.linear",)))
