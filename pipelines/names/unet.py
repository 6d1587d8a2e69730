"""Stable Diffusion 1.x, 2.x and XL as they are published. There blocks of a stage count on, and what is upsampled last
follows the attention, if there is one; so the names depend on how many blocks a stage has and which have attention."""

from __future__ import annotations

from dq.pipelines.naming import NAMINGS, Naming, Rule, renames

PER_STAGE = 2  # residual blocks of a stage on the way down; one more on the way up

_RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
_ATTENTION = (
    *("norm", "proj_in", "proj_out"),
    *(f"transformer_blocks.*.norm{i}" for i in (1, 2, 3)),
    *(f"transformer_blocks.*.attn{i}.{n}" for i in (1, 2) for n in ("to_q", "to_k", "to_v", "to_out.0")),
    *("transformer_blocks.*.ff.net.0.proj", "transformer_blocks.*.ff.net.2"),
)


def _resnet(there: str, here: str) -> dict[str, str]:
    return {f"{there}.{t}": f"{here}.{h}" for t, h in _RESNET.items()}


def _attention(there: str, here: str) -> dict[str, str]:
    return {f"{there}.{n}": f"{here}.{n}" for n in _ATTENTION}


def _rules(stages: int, bare: int) -> tuple[Rule, ...]:
    """Names of a UNet of so many stages, of which stage `bare` on the way up has no attention."""
    names = {
        "time_embed.0": "time_embedding.linear_1",
        "time_embed.2": "time_embedding.linear_2",
        "label_emb.0.0": "add_embedding.linear_1",
        "label_emb.0.2": "add_embedding.linear_2",
        "input_blocks.0.0": "conv_in",
        "out.0": "conv_norm_out",
        "out.2": "conv_out",
    }
    names |= _resnet("middle_block.0", "mid_block.resnets.0") | _resnet("middle_block.2", "mid_block.resnets.1")
    names |= _attention("middle_block.1", "mid_block.attentions.0")
    for stage in range(stages):
        for i in range(PER_STAGE):
            there, here = f"input_blocks.{1 + stage * (PER_STAGE + 1) + i}", f"down_blocks.{stage}"
            names |= _resnet(f"{there}.0", f"{here}.resnets.{i}") | _attention(f"{there}.1", f"{here}.attentions.{i}")
        names[f"input_blocks.{(stage + 1) * (PER_STAGE + 1)}.0.op"] = f"down_blocks.{stage}.downsamplers.0.conv"
        for i in range(PER_STAGE + 1):
            there, here = f"output_blocks.{stage * (PER_STAGE + 1) + i}", f"up_blocks.{stage}"
            names |= _resnet(f"{there}.0", f"{here}.resnets.{i}") | _attention(f"{there}.1", f"{here}.attentions.{i}")
        names[f"{there}.{1 if stage == bare else 2}.conv"] = f"up_blocks.{stage}.upsamplers.0.conv"
    return renames(names)


def _stages(stages: int, bare: int) -> dict[str, tuple[str, ...]]:
    """What a UNet of this form holds, and what it does not."""
    last, inner = f"{PER_STAGE - 1}.conv1", [i for i in range(stages) if i != bare]
    has = [f"down_blocks.{stages - 1}.resnets.{last}", *(f"up_blocks.{i}.attentions.0.norm" for i in inner)]
    lacks = [f"down_blocks.{stages}.resnets.0.conv1", f"up_blocks.{bare}.attentions.0.norm"]
    return {"has": tuple(has), "lacks": (*lacks, f"down_blocks.0.resnets.{PER_STAGE}.conv1")}


for _name, _count, _bare, _label in (("sd", 4, 0, False), ("sdxl", 3, 2, True)):
    _form, _mark = _stages(_count, _bare), ("add_embedding.linear_1",)
    _form["has" if _label else "lacks"] += _mark
    NAMINGS.register(Naming(_name, ("UNet2DConditionModel",), _rules(_count, _bare), **_form))
