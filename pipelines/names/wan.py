"""Wan 2.1 and 2.2 as Alibaba publishes them. norm2 there is norm3 here and the other way round."""

from dq.pipelines.naming import NAMINGS, Naming, renames

_HERE = ("to_q", "to_k", "to_v", "to_out.0", "add_k_proj", "add_v_proj", "norm_added_k")
_THERE = ("q", "k", "v", "o", "k_img", "v_img", "norm_k_img")
_ATTENTION = {
    f"blocks.*.{there}_attn.{t}": f"blocks.*.{here}.{h}"
    for there, here in (("self", "attn1"), ("cross", "attn2"))
    for t, h in (*zip(_THERE, _HERE, strict=True), ("norm_q", "norm_q"), ("norm_k", "norm_k"))
}
_EMBED = "condition_embedder"
_RULES = renames(
    _ATTENTION
    | {
        "blocks.*.ffn.0": "blocks.*.ffn.net.0.proj",
        "blocks.*.ffn.2": "blocks.*.ffn.net.2",
        "blocks.*.norm3": "blocks.*.norm2",
        "blocks.*.modulation": "blocks.*.scale_shift_table",
        "head.modulation": "scale_shift_table",
        "head.head": "proj_out",
        "patch_embedding": "patch_embedding",
        "time_embedding.0": f"{_EMBED}.time_embedder.linear_1",
        "time_embedding.2": f"{_EMBED}.time_embedder.linear_2",
        "time_projection.1": f"{_EMBED}.time_proj",
        "text_embedding.0": f"{_EMBED}.text_embedder.linear_1",
        "text_embedding.2": f"{_EMBED}.text_embedder.linear_2",
        "img_emb.proj.0": f"{_EMBED}.image_embedder.norm1",
        "img_emb.proj.1": f"{_EMBED}.image_embedder.ff.net.0.proj",
        "img_emb.proj.3": f"{_EMBED}.image_embedder.ff.net.2",
        "img_emb.proj.4": f"{_EMBED}.image_embedder.norm2",
    }
)

NAMINGS.register(Naming("wan", ("WanTransformer3DModel",), _RULES))
