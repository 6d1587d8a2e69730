"""Families: pattern matching, the FLUX.1 data, default skips of all families, detection for unknown models."""

import pytest
from torch import nn

from dq.family import FAMILIES, Family, fill, find_family, match_indices, matches
from dq.pipelines.families.detected import detect_family

FLUX = FAMILIES.get("flux.1")

# FLUX.1 by what happens to a linear by default.
FLUX_HIGH_PRECISION = """
context_embedder norm_out.linear proj_out x_embedder time_text_embed.guidance_embedder.linear_1
time_text_embed.guidance_embedder.linear_2 time_text_embed.text_embedder.linear_1
time_text_embed.text_embedder.linear_2 time_text_embed.timestep_embedder.linear_1
time_text_embed.timestep_embedder.linear_2
"""
FLUX_MODULATION = """
single_transformer_blocks.*.norm.linear transformer_blocks.*.norm1.linear transformer_blocks.*.norm1_context.linear
"""
FLUX_QUANTIZED = """
single_transformer_blocks.*.attn.to_k single_transformer_blocks.*.attn.to_q single_transformer_blocks.*.attn.to_v
single_transformer_blocks.*.proj_mlp single_transformer_blocks.*.proj_out transformer_blocks.*.attn.add_k_proj
transformer_blocks.*.attn.add_q_proj transformer_blocks.*.attn.add_v_proj transformer_blocks.*.attn.to_add_out
transformer_blocks.*.attn.to_k transformer_blocks.*.attn.to_out.0 transformer_blocks.*.attn.to_q
transformer_blocks.*.attn.to_v transformer_blocks.*.ff.net.0.proj transformer_blocks.*.ff.net.2
transformer_blocks.*.ff_context.net.0.proj transformer_blocks.*.ff_context.net.2
"""


def named(patterns):
    """Real names for the patterns in a text: stars become 0, 3 and 18."""
    return [p.replace("*", i) for p in patterns.split() for i in ("0", "3", "18")]


def test_flux_defaults():
    for name in named(FLUX_HIGH_PRECISION):
        assert FLUX.keep_reason(name), name
    for name in named(FLUX_MODULATION):
        assert not FLUX.keep_reason(name) and FLUX.is_modulation(name), name
    for name in named(FLUX_QUANTIZED):
        assert not FLUX.keep_reason(name) and not FLUX.is_modulation(name), name


# What the default rules (no family) must keep, and must not keep, in other architectures of diffusers.
KEPT = """
double_stream_modulation_img.linear single_stream_modulation.linear time_guidance_embed.timestep_embedder.linear_1
adaln_single.emb.timestep_embedder.linear_1 adaln_single.linear caption_projection.linear_2
transformer_blocks.*.attn2.to_k transformer_blocks.*.attn2.to_v context_embedder.proj_in
context_embedder.token_refiner.refiner_blocks.*.attn.to_q context_embedder.token_refiner.refiner_blocks.*.ff.net.2
blocks.*.attn2.add_k_proj blocks.*.attn2.to_v condition_embedder.image_embedder.ff.net.0.proj
condition_embedder.time_proj img_in txt_in all_final_layer.2-1.adaLN_modulation.1 all_final_layer.2-1.linear
all_x_embedder.2-1 cap_embedder.1 t_embedder.mlp.0 context_embedder_2.linear_3 image_embedder.linear_1
time_embed.linear proj_out_1 proj_out_2 add_embedding.linear_1 down_blocks.*.attentions.*.proj_in
mid_block.attentions.*.proj_out up_blocks.*.resnets.*.time_emb_proj time_embedding.linear_2
transformer_blocks.*.norm1.emb.timestep_embedder.linear_1 lm_head
"""
MODULATION = """
transformer_blocks.*.norm1.linear transformer_blocks.*.norm1_context.linear transformer_blocks.*.img_mod.1
transformer_blocks.*.txt_mod.1 layers.*.adaLN_modulation.0 noise_refiner.*.adaLN_modulation.0
"""
ORDINARY = """
transformer_blocks.*.ff.linear_in single_transformer_blocks.*.attn.to_qkv_mlp_proj
single_transformer_blocks.*.attn.to_out transformer_blocks.*.attn1.to_k transformer_blocks.*.attn2.to_q
transformer_blocks.*.attn2.to_out.0 blocks.*.attn1.to_q blocks.*.ffn.net.0.proj blocks.*.attn2.to_q
transformer_blocks.*.img_mlp.net.2 layers.*.attention.to_q layers.*.feed_forward.w1
mid_block.attentions.*.transformer_blocks.*.attn1.to_q up_blocks.*.attentions.*.transformer_blocks.*.ff.net.2
model.layers.*.self_attn.q_proj model.layers.*.mlp.down_proj
"""


def test_default_skips_of_other_architectures():
    family = Family("none")
    for name in named(KEPT):
        assert family.keep_reason(name), name
    for name in named(MODULATION):
        assert not family.keep_reason(name) and family.is_modulation(name), name
    for name in named(ORDINARY):
        assert not family.keep_reason(name) and not family.is_modulation(name), name


def test_flux_groups():
    """Which linears get equal inputs was measured on the model; smoothing and low-rank groups are SVDQuant's."""
    double, single = "transformer_blocks.7.attn", "single_transformer_blocks.30"
    qkv = tuple(f"{double}.{n}" for n in ("to_q", "to_k", "to_v"))
    added = tuple(f"{double}.{n}" for n in ("add_q_proj", "add_k_proj", "add_v_proj"))
    single_qkv = tuple(f"{single}.attn.{n}" for n in ("to_q", "to_k", "to_v"))
    for group in (qkv, added, (*single_qkv, f"{single}.proj_mlp")):
        for name in group:
            assert FLUX.partners(FLUX.inputs, name) == group
    for group in (qkv, added, single_qkv):
        assert FLUX.partners(FLUX.lowrank, group[1]) == group
    assert FLUX.partners(FLUX.lowrank, f"{single}.proj_mlp") == (f"{single}.proj_mlp",)
    out = (f"{double}.to_out.0", f"{double}.to_add_out")
    assert FLUX.partners(FLUX.smooth, out[0]) == FLUX.partners(FLUX.smooth, out[1]) == out
    assert FLUX.partners(FLUX.inputs, out[0]) == out[:1]
    for alone in ("transformer_blocks.7.ff.net.0.proj", "transformer_blocks.7.ff.net.2", f"{single}.proj_out"):
        for groups in (FLUX.inputs, FLUX.smooth, FLUX.lowrank):
            assert FLUX.partners(groups, alone) == (alone,)


def test_flux_parts_and_blocks():
    assert FLUX.parts_of("single_transformer_blocks.5.proj_out") == (
        "single_transformer_blocks.5.attn.to_v",
        "single_transformer_blocks.5.proj_mlp",
    )
    assert FLUX.parts_of("proj_out") == () and FLUX.parts_of("transformer_blocks.5.ff.net.2") == ()
    assert FLUX.block_of("single_transformer_blocks.12.attn.to_q") == "single_transformer_blocks.12"
    assert FLUX.block_of("transformer_blocks.0") == "transformer_blocks.0"
    assert FLUX.block_of("x_embedder") == "" and FLUX.block_of("transformer_blocks") == ""


@pytest.mark.parametrize("family", list(FAMILIES), ids=lambda f: f.name)
def test_groups_are_disjoint_and_inside_blocks(family):
    """A linear may stand in one group of a kind, and all members of a group live in one block."""
    for groups in (family.inputs, family.smooth, family.lowrank):
        members = [m for g in groups for m in g]
        assert len(members) == len(set(members))
    for group in family.inputs + family.smooth + family.lowrank:
        assert len({family.block_of(m.replace("*", "1")) for m in group}) == 1
        assert len({m.count("*") for m in group}) == 1
    assert family.classes and not family.assumed


def test_stars_stand_for_one_component():
    assert match_indices("blocks.*.attn.to_q", "blocks.12.attn.to_q") == ("12",)
    assert match_indices("a.*.b.*.c", "a.1.b.2.c") == ("1", "2")
    assert match_indices("blocks.*", "blocks.1.attn") is None and match_indices("blocks.*", "xblocks.1") is None
    assert match_indices("a.b", "axb") is None
    assert fill("a.*.b.*.c", ("1", "2")) == "a.1.b.2.c"


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("*.to_out.0", "transformer_blocks.1.attn.to_out.0", True),
        ("to_out.0", "transformer_blocks.1.attn.to_out.0", True),
        ("to_out", "transformer_blocks.1.attn.to_out.0", True),
        ("ff", "transformer_blocks.1.ff.net.2", True),
        ("ff", "transformer_blocks.1.ff_context.net.2", False),
        ("transformer_blocks.1", "transformer_blocks.1.ff.net.2", True),
        ("transformer_blocks.1", "transformer_blocks.11.ff.net.2", False),
        ("transformer_blocks.1.*", "single_transformer_blocks.1.proj_mlp", False),
        ("proj_out", "proj_out", True),
        ("proj", "single_transformer_blocks.1.proj_out", False),
        ("*proj*", "single_transformer_blocks.1.proj_out", True),
    ],
)
def test_skip_patterns(pattern, name, expected):
    assert matches(name, pattern) == expected


class Attention(nn.Module):
    def __init__(self, dim, context=None):
        super().__init__()
        self.to_q, self.to_out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.to_k, self.to_v = nn.Linear(context or dim, dim), nn.Linear(context or dim, dim)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attn1, self.attn2 = Attention(dim), Attention(dim, 24)
        self.gate_proj, self.up_proj = nn.Linear(dim, 2 * dim), nn.Linear(dim, 2 * dim)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))  # an inner list is no block list


class MadeUp(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.late = nn.ModuleList(Block(16) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(4))  # nothing to quantize in there
        self.mixed = nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4)])  # not repeated blocks
        self.head = nn.Linear(16, 16)


def test_detection():
    model = MadeUp()
    family = detect_family(model)
    assert family == find_family(model)
    assert set(family.blocks) == {"blocks.*", "late.*"}
    assert family.keep_outputs, "an unknown model may read any earlier output"
    attention = ("blocks.*.attn1.to_q", "blocks.*.attn1.to_k", "blocks.*.attn1.to_v")
    assert attention in family.inputs and ("late.*.gate_proj", "late.*.up_proj") in family.inputs
    # In cross-attention only k and v read the text; q does not belong to them.
    assert ("blocks.*.attn2.to_k", "blocks.*.attn2.to_v") in family.inputs
    assert all("blocks.*.attn2.to_q" not in g for g in family.inputs)
    assert family.block_of("blocks.2.experts.1") == "blocks.2" and family.block_of("head") == ""
    for word in ("MadeUp is no known family", "blocks (3)", "late (2)", "6 groups"):
        assert word in family.assumed


def test_detection_by_width():
    """A key of another width cannot share the input of the query, whatever the names say."""
    model = nn.Module()
    model.layers = nn.ModuleList(Attention(16, 8) for _ in range(2))
    assert detect_family(model).inputs == ()


def test_known_classes_are_found(tiny):
    assert find_family(tiny.flux()) is FLUX
