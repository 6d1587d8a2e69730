"""Tiny pipelines: the pipeline classes and schedulers of diffusers around tiny denoisers; texts are encoded by a stub.

The stub stands for `encode_prompt` and gives what the real one gives, in its order: embeddings that depend on the text
alone. Where a pipeline passes prompts of their own length on, so does the stub (a word is a token).
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from tiny_models import CASES

WIDTH = 32


def embedding(text: str, length: int = 0, width: int = WIDTH) -> torch.Tensor:
    """[length, width] drawn from the text; `length` 0 takes one token per word and one more."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    tokens = length or len(text.split()) + 1
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))


def texts(prompt: Any, count: int = 1) -> list[str]:
    return [prompt] * count if isinstance(prompt, str) else list(prompt)


def _pair(self: Any, prompt: Any, negative: Any) -> tuple[list[str], list[str]]:
    prompts = texts(prompt)
    return prompts, texts("" if negative is None else negative, len(prompts))


def stub(kind: str, length: int) -> Callable[..., Any]:
    """`encode_prompt` of one of five forms; negative embeddings are None where guidance is off."""

    def one(words: list[str]) -> torch.Tensor:
        longest = length or max(len(w.split()) + 1 for w in words)
        return torch.stack([embedding(w, longest) for w in words])

    def encode(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(type(self).encode_prompt).bind(self, *args, **kwargs).arguments
        prompt, negative_prompt = bound.get("prompt"), bound.get("negative_prompt")
        guided = bound.get("do_classifier_free_guidance", True)
        if kind in ("plain", "flux2", "hunyuan", "hunyuan15"):  # called once for the prompt, once for the negative one
            p = one(texts(prompt))
            mask = torch.ones(p.shape[:2])
            pooled = p.mean(1)
            return {"plain": (p, mask.bool()), "flux2": (p, torch.zeros(*p.shape[:2], 4)), "hunyuan": (p, pooled, mask),
                    "hunyuan15": (p, mask, p[:, :3] * 0.5, mask[:, :3])}[kind]  # fmt: skip
        prompts, negatives = _pair(self, prompt, negative_prompt)
        if kind == "lists":
            return [embedding(w) for w in prompts], [embedding(w) for w in negatives] if guided else []
        p, n = one(prompts), one(negatives) if guided else None
        if kind == "pair":
            return p, n
        if kind == "pooled":
            both = [None if t is None else t.mean(1).repeat(1, self._pooled // WIDTH) for t in (p, n)]
            return p, n, *both
        kind_of_mask = torch.bool if type(self).__name__.startswith("Lumina") else torch.float32
        masks = [None if t is None else torch.ones(t.shape[:2], dtype=kind_of_mask) for t in (p, n)]
        if kind == "ids":
            ids = [None if t is None else torch.zeros(t.shape[1], 3) for t in (p, n)]
            return p, ids[0], masks[0], n, ids[1], masks[1]
        return p, masks[0], n, masks[1]

    return encode


CHANGES = {
    "dit": dict(num_embeds_ada_norm=1000, out_channels=8),  # class 1000 stands for none
    "hunyuan-video-1.5": dict(in_channels=9),  # latents, a first frame and its mask
}


def build(name: str) -> Any:
    """The pipeline of the table `PIPELINES`, or `modular`."""
    import diffusers

    if name == "modular sd3":
        return modular()

    cls, case, scheduler, kind, length, parts = PIPELINES[name]
    denoiser = "unet" if "UNet" in case else "transformer"
    model = CASES[case].build(**CHANGES.get(name, {}))
    made = {k: v() if callable(v) else v for k, v in parts.items()}
    pipe = getattr(diffusers, cls)(**{denoiser: model, "scheduler": scheduler()} | made)
    if kind:
        pipe.encode_prompt = MethodType(stub(kind, length), pipe)
    pipe._pooled = 64 if cls == "StableDiffusion3Pipeline" else WIDTH
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _scheduler(name: str, **config: Any) -> Callable[[], Any]:
    def make() -> Any:
        import diffusers

        return getattr(diffusers, name)(**config)

    return make


def _vae() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 8), layers_per_block=1, latent_channels=4, norm_num_groups=2,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    ).eval()  # fmt: skip


def _guider() -> Any:
    from diffusers.guiders import ClassifierFreeGuidance

    return ClassifierFreeGuidance(guidance_scale=5.0)


class Sizes(torch.nn.Module):
    """What HunyuanVideo15Pipeline asks its VAE for."""

    config = SimpleNamespace(latent_channels=4)
    temporal_compression_ratio, spatial_compression_ratio = 4, 16
    device, dtype = torch.device("cpu"), torch.float32


def _wan_second() -> Any:
    return CASES["WanTransformer3DModel"].build(seed=1)


_FLOW = _scheduler("FlowMatchEulerDiscreteScheduler")
_NO_TEXT = dict(text_encoder=None, tokenizer=None)
_TWO = _NO_TEXT | dict(text_encoder_2=None, tokenizer_2=None)
# name -> pipeline class, case of its denoiser, scheduler, form of `encode_prompt`, tokens (0: as many as words), rest
PIPELINES: dict[str, tuple[str, str, Callable[[], Any], str, int, dict[str, Any]]] = {
    "sd1.5": ("StableDiffusionPipeline", "UNet2DConditionModel", _scheduler("PNDMScheduler", skip_prk_steps=True),
              "pair", 7, _NO_TEXT | dict(vae=_vae, safety_checker=None, feature_extractor=None,
                                         requires_safety_checker=False)),
    "sdxl": ("StableDiffusionXLPipeline", "UNet2DConditionModel@sdxl", _scheduler("EulerDiscreteScheduler"), "pooled",
             7, _TWO | dict(vae=_vae)),
    "sd3": ("StableDiffusion3Pipeline", "SD3Transformer2DModel@dual", _FLOW, "pooled", 7,
            _TWO | dict(vae=_vae, text_encoder_3=None, tokenizer_3=None)),
    "pixart": ("PixArtSigmaPipeline", "PixArtTransformer2DModel", _scheduler("DPMSolverMultistepScheduler"), "masked",
               7, _NO_TEXT | dict(vae=_vae)),
    "sana": ("SanaPipeline", "SanaTransformer2DModel", _FLOW, "masked", 7, _NO_TEXT | dict(vae=None)),
    "ltx": ("LTXPipeline", "LTXVideoTransformer3DModel", _FLOW, "masked", 7, _NO_TEXT | dict(vae=None)),
    "cogvideox": ("CogVideoXPipeline", "CogVideoXTransformer3DModel", _scheduler("CogVideoXDDIMScheduler"), "pair", 5,
                  _NO_TEXT | dict(vae=None)),
    "z-image": ("ZImagePipeline", "ZImageTransformer2DModel", _FLOW, "lists", 0, _NO_TEXT | dict(vae=_vae)),
    "wan2.1": ("WanPipeline", "WanTransformer3DModel", _FLOW, "pair", 0, _NO_TEXT | dict(vae=None)),
    "wan2.2": ("WanPipeline", "WanTransformer3DModel", _FLOW, "pair", 0,
               _NO_TEXT | dict(vae=None, transformer_2=_wan_second, boundary_ratio=0.6)),
    "qwen-image": ("QwenImagePipeline", "QwenImageTransformer2DModel", _FLOW, "plain", 0, _NO_TEXT | dict(vae=None)),
    "lumina2": ("Lumina2Pipeline", "Lumina2Transformer2DModel", _FLOW, "masked", 0, _NO_TEXT | dict(vae=_vae)),
    "chroma": ("ChromaPipeline", "ChromaTransformer2DModel", _FLOW, "ids", 0, _NO_TEXT | dict(vae=None)),
    "hunyuan-video": ("HunyuanVideoPipeline", "HunyuanVideoTransformer3DModel", _FLOW, "hunyuan", 0,
                      _TWO | dict(vae=None)),
    "hunyuan-video-1.5": ("HunyuanVideo15Pipeline", "HunyuanVideo15Transformer3DModel", _FLOW, "hunyuan15", 0,
                          _TWO | dict(vae=Sizes, guider=_guider)),
    "flux.2": ("Flux2Pipeline", "Flux2Transformer2DModel", _FLOW, "flux2", 0, _NO_TEXT | dict(vae=None)),
    "dit": ("DiTPipeline", "DiTTransformer2DModel", _scheduler("DDIMScheduler"), "", 0, dict(vae=_vae)),
}  # fmt: skip


def modular() -> Any:
    """Stable Diffusion 3 as a modular pipeline: the denoising blocks of diffusers behind a stub of the text block. Its
    guider calls the transformer once per prediction, without names."""
    from diffusers.modular_pipelines import ModularPipelineBlocks, SequentialPipelineBlocks
    from diffusers.modular_pipelines.modular_pipeline_utils import InputParam, OutputParam
    from diffusers.modular_pipelines.stable_diffusion_3 import modular_blocks_stable_diffusion_3 as blocks

    names = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")

    class TextBlock(ModularPipelineBlocks):
        model_name = "stable-diffusion-3"
        inputs = [InputParam("prompt"), InputParam("negative_prompt")]
        intermediate_outputs = [OutputParam(name, type_hint=torch.Tensor) for name in names]

        def __call__(self, components: Any, state: Any) -> tuple[Any, Any]:
            block = self.get_block_state(state)
            prompts, negatives = _pair(self, block.prompt, block.negative_prompt)
            p, n = (torch.stack([embedding(w, 7) for w in words]) for words in (prompts, negatives))
            found = (p, n, p.mean(1).repeat(1, 2), n.mean(1).repeat(1, 2))
            for name, value in zip(names, found, strict=True):
                setattr(block, name, value)
            self.set_block_state(state, block)
            return components, state

    steps = {"text_encoder": TextBlock(), "denoise": blocks.StableDiffusion3T2ICoreDenoiseStep()}
    pipe = SequentialPipelineBlocks.from_blocks_dict(steps).init_pipeline()
    pipe.update_components(transformer=CASES["SD3Transformer2DModel@dual"].build(), scheduler=_FLOW())
    return pipe
