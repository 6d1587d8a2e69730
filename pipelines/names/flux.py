"""FLUX.1 as Black Forest Labs publishes it (`flux1-dev.safetensors`), and Chroma, which was made from it."""

from dq.pipelines.naming import NAMINGS, Naming, Rule, renames

_D, _S = "transformer_blocks.*", "single_transformer_blocks.*"
_TIME = "time_text_embed"


def streams(mlp: tuple[str, str]) -> tuple[Rule, ...]:
    """Image and text stream of the double blocks; `mlp` names the two linears of a feed-forward here."""
    out: list[Rule] = []
    for there, attn, norms, to_out, ff in (
        ("img", ("to_q", "to_k", "to_v"), ("norm_q", "norm_k"), "to_out.0", "ff"),
        (
            "txt",
            ("add_q_proj", "add_k_proj", "add_v_proj"),
            ("norm_added_q", "norm_added_k"),
            "to_add_out",
            "ff_context",
        ),
    ):
        block = f"double_blocks.*.{there}"
        out += [
            Rule(f"{block}_attn.qkv", tuple(f"{_D}.attn.{n}" for n in attn)),
            Rule(f"{block}_attn.norm.query_norm", (f"{_D}.attn.{norms[0]}",), leaf="scale"),
            Rule(f"{block}_attn.norm.key_norm", (f"{_D}.attn.{norms[1]}",), leaf="scale"),
            Rule(f"{block}_attn.proj", (f"{_D}.attn.{to_out}",)),
            *(Rule(f"{block}_mlp.{i}", (f"{_D}.{ff}.{n}",)) for i, n in zip((0, 2), mlp, strict=True)),
        ]
    return tuple(out)


SINGLE_NORMS = (
    Rule("single_blocks.*.norm.query_norm", (f"{_S}.attn.norm_q",), leaf="scale"),
    Rule("single_blocks.*.norm.key_norm", (f"{_S}.attn.norm_k",), leaf="scale"),
)
_BLOCKS = (
    *streams(("net.0.proj", "net.2")),
    *SINGLE_NORMS,
    Rule("single_blocks.*.linear1", (*(f"{_S}.attn.{n}" for n in ("to_q", "to_k", "to_v")), f"{_S}.proj_mlp")),
    *renames({"single_blocks.*.linear2": f"{_S}.proj_out", "final_layer.linear": "proj_out",
              "txt_in": "context_embedder", "img_in": "x_embedder"}),
)  # fmt: skip

_MODULATED = (
    *renames({
        "double_blocks.*.img_mod.lin": f"{_D}.norm1.linear",
        "double_blocks.*.txt_mod.lin": f"{_D}.norm1_context.linear",
        "single_blocks.*.modulation.lin": f"{_S}.norm.linear",
        "time_in.in_layer": f"{_TIME}.timestep_embedder.linear_1",
        "time_in.out_layer": f"{_TIME}.timestep_embedder.linear_2",
        "guidance_in.in_layer": f"{_TIME}.guidance_embedder.linear_1",
        "guidance_in.out_layer": f"{_TIME}.guidance_embedder.linear_2",
        "vector_in.in_layer": f"{_TIME}.text_embedder.linear_1",
        "vector_in.out_layer": f"{_TIME}.text_embedder.linear_2",
    }),
    Rule("final_layer.adaLN_modulation.1", ("norm_out.linear",), swap=True),
)  # fmt: skip

NAMINGS.register(Naming("flux.1", ("FluxTransformer2DModel",), _BLOCKS + _MODULATED))

_GUIDANCE = "distilled_guidance_layer"
_CHROMA = (
    *renames({f"{_GUIDANCE}.{n}": f"{_GUIDANCE}.{n}" for n in ("in_proj", "out_proj")}),
    *renames({f"{_GUIDANCE}.layers.*.in_layer": f"{_GUIDANCE}.layers.*.linear_1",
              f"{_GUIDANCE}.layers.*.out_layer": f"{_GUIDANCE}.layers.*.linear_2"}),
    Rule(f"{_GUIDANCE}.norms.*", (f"{_GUIDANCE}.norms.*",), leaf="scale"),
)  # fmt: skip
NAMINGS.register(Naming("chroma", ("ChromaTransformer2DModel",), _BLOCKS + _CHROMA))
