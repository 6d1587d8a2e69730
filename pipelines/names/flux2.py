"""FLUX.2 as Black Forest Labs publishes it (`flux2-dev.safetensors`)."""

from dq.pipelines.naming import NAMINGS, Naming, Rule, renames

_D, _S, _TIME = "transformer_blocks.*", "single_transformer_blocks.*", "time_guidance_embed"
_STREAMS = (
    ("img", ("to_q", "to_k", "to_v"), "norm_q", "norm_k", "to_out.0", "ff"),
    ("txt", ("add_q_proj", "add_k_proj", "add_v_proj"), "norm_added_q", "norm_added_k", "to_add_out", "ff_context"),
)
_DOUBLE = tuple(
    rule
    for there, qkv, norm_q, norm_k, out, ff in _STREAMS
    for rule in (
        Rule(f"double_blocks.*.{there}_attn.qkv", tuple(f"{_D}.attn.{n}" for n in qkv)),
        Rule(f"double_blocks.*.{there}_attn.norm.query_norm", (f"{_D}.attn.{norm_q}",), leaf="scale"),
        Rule(f"double_blocks.*.{there}_attn.norm.key_norm", (f"{_D}.attn.{norm_k}",), leaf="scale"),
        Rule(f"double_blocks.*.{there}_attn.proj", (f"{_D}.attn.{out}",)),
        Rule(f"double_blocks.*.{there}_mlp.0", (f"{_D}.{ff}.linear_in",)),
        Rule(f"double_blocks.*.{there}_mlp.2", (f"{_D}.{ff}.linear_out",)),
    )
)
_REST = (
    *renames({
        "single_blocks.*.linear1": f"{_S}.attn.to_qkv_mlp_proj",
        "single_blocks.*.linear2": f"{_S}.attn.to_out",
        "img_in": "x_embedder",
        "txt_in": "context_embedder",
        "time_in.in_layer": f"{_TIME}.timestep_embedder.linear_1",
        "time_in.out_layer": f"{_TIME}.timestep_embedder.linear_2",
        "guidance_in.in_layer": f"{_TIME}.guidance_embedder.linear_1",
        "guidance_in.out_layer": f"{_TIME}.guidance_embedder.linear_2",
        "double_stream_modulation_img.lin": "double_stream_modulation_img.linear",
        "double_stream_modulation_txt.lin": "double_stream_modulation_txt.linear",
        "single_stream_modulation.lin": "single_stream_modulation.linear",
        "final_layer.linear": "proj_out",
    }),
    Rule("single_blocks.*.norm.query_norm", (f"{_S}.attn.norm_q",), leaf="scale"),
    Rule("single_blocks.*.norm.key_norm", (f"{_S}.attn.norm_k",), leaf="scale"),
    Rule("final_layer.adaLN_modulation.1", ("norm_out.linear",), swap=True),
)  # fmt: skip

NAMINGS.register(Naming("flux.2", ("Flux2Transformer2DModel",), _DOUBLE + _REST))
