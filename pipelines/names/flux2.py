"""FLUX.2 as Black Forest Labs publishes it (`flux2-dev.safetensors`)."""

from dq.pipelines.names.flux import SINGLE_NORMS, streams
from dq.pipelines.naming import NAMINGS, Naming, Rule, renames

_S, _TIME = "single_transformer_blocks.*", "time_guidance_embed"
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
    *SINGLE_NORMS,
    Rule("final_layer.adaLN_modulation.1", ("norm_out.linear",), swap=True),
)  # fmt: skip

NAMINGS.register(Naming("flux.2", ("Flux2Transformer2DModel",), streams(("linear_in", "linear_out")) + _REST))
