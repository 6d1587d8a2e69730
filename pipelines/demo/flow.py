"""Flow matching of the transformer with both text encoders, and the distillation of guidance into its embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import loop, text

DROP = 0.1  # part of the prompts replaced by the empty one
GUIDANCE = (1.0, 6.0)


def pack(latents: torch.Tensor) -> torch.Tensor:
    """[N, C, H, W] -> [N, H/2 * W/2, 4C], the order of FluxPipeline."""
    n, c, h, w = latents.shape
    x = latents.view(n, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return x.reshape(n, (h // 2) * (w // 2), c * 4)


class Prompts:
    """Token ids of all prompt variants on the device, and a draw of (picture, prompt) pairs that never waits."""

    def __init__(self, data, tokenizers: str, device):
        clip, t5 = text.load_tokenizers(tokenizers)
        flat = [t for row in data.texts for t in row]
        self.variants = len(data.texts[0])
        self.clip, self.t5 = text.encode(clip, flat).to(device), text.encode(t5, flat).to(device)
        self.empty = text.encode(clip, [""]).to(device), text.encode(t5, [""]).to(device)
        weights = torch.as_tensor(data.weights, dtype=torch.float64)
        self.cumulative = (weights.cumsum(0) / weights.sum()).float().to(device)
        self.checksum = int((self.clip.sum() * 31 + self.t5.sum()).item())

    def draw(self, n: int):
        """(picture index [n], clip ids, t5 ids, dropped bool [n]); dropped rows hold the empty prompt."""
        device = self.clip.device
        index = torch.searchsorted(self.cumulative, torch.rand(n, device=device)).clamp_max(len(self.cumulative) - 1)
        row = index * self.variants + torch.randint(0, self.variants, (n,), device=device)
        dropped = torch.rand(n, device=device) < DROP
        pick = [torch.where(dropped[:, None], e, t[row]) for e, t in zip(self.empty, (self.clip, self.t5), strict=True)]
        return index, pick[0], pick[1], dropped


class Model:
    """The denoiser with its text encoders: velocity(x, t, guidance, embeddings)."""

    def __init__(self, modules: dict, tokens: int, device):
        self.modules, self.device = modules, device
        side = int(tokens**0.5)
        grid = torch.zeros(side, side, 3)
        grid[..., 1], grid[..., 2] = torch.arange(side)[:, None], torch.arange(side)[None]
        self.img_ids = grid.view(-1, 3).to(device)
        self.txt_ids = torch.zeros(text.TEXT_TOKENS, 3, device=device)
        rotary = modules["transformer"].pos_embed(torch.cat([self.txt_ids, self.img_ids]))
        modules["transformer"].pos_embed.forward = lambda ids: rotary  # constant here: saves launches

    def embed(self, clip_ids, t5_ids):
        """(pooled CLIP output [n, d], T5 states [n, TEXT_TOKENS, d]); no attention mask, as in FluxPipeline."""
        pooled = self.modules["text_encoder"](clip_ids).pooler_output
        return pooled, self.modules["text_encoder_2"](t5_ids)[0]

    def velocity(self, x, t, guidance, embeddings):
        """The denoiser's output in float32, [n, tokens, channels]; t and guidance: [n]."""
        pooled, tokens = embeddings
        return self.modules["transformer"](
            hidden_states=x,
            encoder_hidden_states=tokens,
            pooled_projections=pooled,
            timestep=t,
            guidance=guidance,
            img_ids=self.img_ids,
            txt_ids=self.txt_ids,
            return_dict=False,
        )[0].float()


def draw_time(n: int, device) -> torch.Tensor:
    """t in (0, 1), 1 is noise: logit-normal, every fifth uniform so that the ends are learned as well."""
    t = torch.sigmoid(torch.randn(n, device=device) + 0.2)
    return torch.where(torch.rand(n, device=device) < 0.2, torch.rand(n, device=device), t)


def draw_guidance(n: int, device) -> torch.Tensor:
    """[n] guidance values, uniform in GUIDANCE."""
    return GUIDANCE[0] + (GUIDANCE[1] - GUIDANCE[0]) * torch.rand(n, device=device)


def noisy(latents: torch.Tensor):
    """(x_t = (1-t) x0 + t e, t, e - x0) for packed latents [n, tokens, channels]."""
    t = draw_time(len(latents), latents.device)
    noise = torch.randn_like(latents)
    return torch.lerp(latents, noise, t[:, None, None]), t, noise - latents


def flow_loss(model: Model, prompts: Prompts, latents: torch.Tensor, batch: int):
    """Mean squared error of the velocity, prompt and guidance drawn at random; the guidance has no effect yet."""
    index, clip_ids, t5_ids, _ = prompts.draw(batch)
    x, t, target = noisy(latents[index])
    with torch.autocast(latents.device.type, torch.bfloat16, enabled=latents.is_cuda):
        out = model.velocity(x, t, draw_guidance(batch, x.device), model.embed(clip_ids, t5_ids))
    return F.mse_loss(out, target)


def distill_loss(model: Model, teacher: Model, prompts: Prompts, latents: torch.Tensor, batch: int):
    """The student at guidance g matches u + g (c - u) of the frozen teacher; with the empty prompt it matches u, so
    `true_cfg_scale` keeps working."""
    index, clip_ids, t5_ids, dropped = prompts.draw(batch)
    x, t, _ = noisy(latents[index])
    g = draw_guidance(batch, x.device)
    with torch.autocast(latents.device.type, torch.bfloat16, enabled=latents.is_cuda):
        with torch.no_grad():
            cond = teacher.embed(clip_ids, t5_ids)
            empty = [e.expand(batch, *e.shape[1:]) for e in teacher.embed(*prompts.empty)]
            both = [torch.cat([a, b]) for a, b in zip(cond, empty, strict=True)]
            c, u = teacher.velocity(x.repeat(2, 1, 1), t.repeat(2), g.repeat(2), both).chunk(2)
            target = torch.where(dropped[:, None, None], u, u + g[:, None, None] * (c - u))
        out = model.velocity(x, t, g, cond)
    return F.mse_loss(out, target)


def compile_blocks(modules: dict) -> None:
    """Compiles each kind of transformer block once."""
    modules["transformer"].compile_repeated_blocks(dynamic=False)


def make_loss(modules, teacher, prompts, latents, batch: int, compiled: bool):
    """A function without arguments that draws a batch and returns the loss of the phase."""
    model = Model(modules, latents.shape[1], latents.device)
    frozen = Model(teacher, latents.shape[1], latents.device) if teacher else None
    for part in (modules, teacher) if compiled else ():
        if part:
            compile_blocks(part)
    if frozen:
        return lambda: distill_loss(model, frozen, prompts, latents, batch)
    return lambda: flow_loss(model, prompts, latents, batch)


def train(modules, teacher, prompts, latents, *, batch, ema, compiled, graph, on_log, **schedule):
    """One piece: flow matching of all modules, or with a `teacher` ({name: module}) guidance distillation of the
    transformer alone. `schedule` goes to `loop.run`. Calls on_log(step, loss, averaged modules); returns the same."""
    trained = {"transformer": modules["transformer"]} if teacher else modules
    average = loop.Average(trained, ema)
    loss_fn = make_loss(modules, teacher, prompts, latents, batch, compiled)
    trainer = loop.Trainer([p for m in trained.values() for p in m.parameters()], loss_fn, graph=graph)
    averaged = {**modules, **average.models}
    steps, loss = loop.run(trainer, average, on_log=lambda s, v: on_log(s, v, averaged), **schedule)
    return steps, loss, averaged
