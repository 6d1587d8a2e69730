"""Decoders of transformers: Llama, Mistral, Qwen2 and Qwen3, Gemma 1 to 3, Phi-3 with its fused projections, and the
mixtures Mixtral, Qwen2-MoE, Qwen3-MoE and gpt-oss; with a vision tower, which stays, Qwen2-VL to Qwen3-VL, Mistral 3
and Gemma 3.

q, k, v read one normalised input, as do gate and up; o and down stand alone. The head and the embeddings stay in 16
bits (a tied head is the embedding); q_norm and k_norm of Qwen3 and Gemma 3 are no linears. The factor of down folds
into up, the linear half of the gated unit, that of q, k, v and of gate, up into the norm before them; not into Gemma's,
which scale by 1 + weight. That of o folds into v where every head has values of its own; with grouped queries several
heads read each row of v, and it stays. Keys and values of grouped queries are narrow: the bound on sizes is 64.
Phi-3's qkv_proj and gate_up_proj are single linears: rows of one are what the others hold in three or two.
Of a mixture, gate and up of every expert read the tokens sent to it; its norm is read by the router too and takes no
factor.
"""

from dq.family import FAMILIES, HIGH_PRECISION, Family, Fold

# Beside a decoder that reads text alone (a text encoder of a pipeline); prompts never reach it.
_VISION = (r"(^|\.)(visual|vision_tower|vision_model|multi_modal_projector)(\.|$)", "vision tower")


def _family(
    name: str,
    classes: tuple[str, ...],
    *,
    fused: bool = False,
    norms: tuple[str, ...] = (),
    experts: tuple[str, ...] = (),
) -> Family:
    """One decoder family; `norms` names the norms before attention and MLP whose weight is a plain factor, `experts`
    what holds gate, up and down in a block of a mixture."""
    inputs, folds, blocks = [], [], []
    for path in ("model.layers.*", "layers.*", "model.language_model.layers.*", "language_model.layers.*"):
        qkv = tuple(f"{path}.self_attn.{n}" for n in (("qkv_proj",) if fused else ("q_proj", "k_proj", "v_proj")))
        up = tuple(f"{path}.mlp.{n}" for n in (("gate_up_proj",) if fused else ("gate_proj", "up_proj")))
        down = (f"{path}.mlp.down_proj",)
        blocks.append(path)
        inputs += [] if fused else [qkv, up]
        folds.append(Fold("rows", down, up, 2, (1,)) if fused else Fold("rows", down, up[1:]))
        out = (f"{path}.self_attn.o_proj",)
        folds.append(Fold("rows", out, qkv, 3, (2,)) if fused else Fold("rows", out, qkv[2:]))
        for consumers, norm in zip((qkv, up), norms, strict=False):
            folds.append(Fold("norm", consumers, (f"{path}.{norm}",)))
        for part in (f"{path}.mlp.{e}" for e in experts):
            inputs.append((f"{part}.gate_proj", f"{part}.up_proj"))
            folds.append(Fold("rows", (f"{part}.down_proj",), (f"{part}.up_proj",)))
    return Family(
        name=name,
        classes=classes,
        blocks=tuple(blocks),
        inputs=tuple(inputs),
        lowrank=tuple(inputs),
        folds=tuple(folds),
        high_precision=(*HIGH_PRECISION, _VISION),
        min_features=64,
    )


_LLAMA = ("input_layernorm", "post_attention_layernorm")


def _classes(*stems: str) -> tuple[str, ...]:
    kinds = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification")
    return tuple(stem + kind for stem in stems for kind in kinds)


def _seeing(*stems: str) -> tuple[str, ...]:
    """Decoders with a vision tower, whole and as the part that reads text."""
    return tuple(stem + kind for stem in stems for kind in ("ForConditionalGeneration", "Model", "TextModel"))


FAMILIES.register(_family("llama", _classes("Llama"), norms=_LLAMA))
FAMILIES.register(_family("mistral", (*_classes("Mistral"), *_seeing("Mistral3")), norms=_LLAMA))
FAMILIES.register(_family("qwen2", (*_classes("Qwen2"), *_seeing("Qwen2VL", "Qwen2_5_VL")), norms=_LLAMA))
FAMILIES.register(_family("qwen3", (*_classes("Qwen3"), *_seeing("Qwen3VL")), norms=_LLAMA))
FAMILIES.register(_family("gemma", (*_classes("Gemma", "Gemma2", "Gemma3"), *_seeing("Gemma3"))))
FAMILIES.register(_family("phi-3", _classes("Phi3"), fused=True, norms=_LLAMA))
_EXPERTS = ("experts.*", "shared_expert")
FAMILIES.register(_family("qwen-moe", _classes("Qwen2Moe", "Qwen3Moe"), norms=_LLAMA[:1], experts=_EXPERTS))
FAMILIES.register(_family("mixtral", _classes("Mixtral"), norms=_LLAMA[:1], experts=_EXPERTS[:1]))
FAMILIES.register(_family("gpt-oss", _classes("GptOss"), norms=_LLAMA[:1]))
