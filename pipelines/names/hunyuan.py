"""HunyuanVideo as Tencent publishes it."""

from dq.pipelines.naming import NAMINGS, Naming, Rule, renames

_D, _S, _TIME = "transformer_blocks.*", "single_transformer_blocks.*", "time_text_embed"
_R, _CONTEXT = "context_embedder.token_refiner.refiner_blocks.*", "context_embedder"
_REFINER = "txt_in.individual_token_refiner.blocks.*"
_STREAMS = (
    ("img", ("to_q", "to_k", "to_v"), "norm_q", "norm_k", "to_out.0", "norm1", "ff"),
    ("txt", ("add_q_proj", "add_k_proj", "add_v_proj"), "norm_added_q", "norm_added_k", "to_add_out", "norm1_context",
     "ff_context"),
)  # fmt: skip
_DOUBLE = tuple(
    rule
    for there, qkv, norm_q, norm_k, out, norm, ff in _STREAMS
    for rule in (
        Rule(f"double_blocks.*.{there}_attn_qkv", tuple(f"{_D}.attn.{n}" for n in qkv)),
        *renames({
            f"double_blocks.*.{there}_attn_q_norm": f"{_D}.attn.{norm_q}",
            f"double_blocks.*.{there}_attn_k_norm": f"{_D}.attn.{norm_k}",
            f"double_blocks.*.{there}_attn_proj": f"{_D}.attn.{out}",
            f"double_blocks.*.{there}_mod.linear": f"{_D}.{norm}.linear",
            f"double_blocks.*.{there}_mlp.fc1": f"{_D}.{ff}.net.0.proj",
            f"double_blocks.*.{there}_mlp.fc2": f"{_D}.{ff}.net.2",
        }),
    )
)  # fmt: skip
_REST = (
    Rule("single_blocks.*.linear1", (*(f"{_S}.attn.{n}" for n in ("to_q", "to_k", "to_v")), f"{_S}.proj_mlp")),
    Rule(f"{_REFINER}.self_attn_qkv", tuple(f"{_R}.attn.{n}" for n in ("to_q", "to_k", "to_v"))),
    Rule("final_layer.adaLN_modulation.1", ("norm_out.linear",), swap=True),
    *renames({
        "single_blocks.*.linear2": f"{_S}.proj_out",
        "single_blocks.*.q_norm": f"{_S}.attn.norm_q",
        "single_blocks.*.k_norm": f"{_S}.attn.norm_k",
        "single_blocks.*.modulation.linear": f"{_S}.norm.linear",
        f"{_REFINER}.self_attn_proj": f"{_R}.attn.to_out.0",
        f"{_REFINER}.norm1": f"{_R}.norm1",
        f"{_REFINER}.norm2": f"{_R}.norm2",
        f"{_REFINER}.mlp.fc1": f"{_R}.ff.net.0.proj",
        f"{_REFINER}.mlp.fc2": f"{_R}.ff.net.2",
        f"{_REFINER}.adaLN_modulation.1": f"{_R}.norm_out.linear",
        "txt_in.input_embedder": f"{_CONTEXT}.proj_in",
        "txt_in.t_embedder.mlp.0": f"{_CONTEXT}.{_TIME}.timestep_embedder.linear_1",
        "txt_in.t_embedder.mlp.2": f"{_CONTEXT}.{_TIME}.timestep_embedder.linear_2",
        "txt_in.c_embedder.linear_1": f"{_CONTEXT}.{_TIME}.text_embedder.linear_1",
        "txt_in.c_embedder.linear_2": f"{_CONTEXT}.{_TIME}.text_embedder.linear_2",
        "img_in.proj": "x_embedder.proj",
        "time_in.mlp.0": f"{_TIME}.timestep_embedder.linear_1",
        "time_in.mlp.2": f"{_TIME}.timestep_embedder.linear_2",
        "guidance_in.mlp.0": f"{_TIME}.guidance_embedder.linear_1",
        "guidance_in.mlp.2": f"{_TIME}.guidance_embedder.linear_2",
        "vector_in.in_layer": f"{_TIME}.text_embedder.linear_1",
        "vector_in.out_layer": f"{_TIME}.text_embedder.linear_2",
        "final_layer.linear": "proj_out",
    }),
)  # fmt: skip

NAMINGS.register(Naming("hunyuan-video", ("HunyuanVideoTransformer3DModel",), _DOUBLE + _REST))
