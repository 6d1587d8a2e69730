"""Trains the autoencoder and measures its latents."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import loop, models

KL_WEIGHT = 1e-3


def gradient_loss(a: torch.Tensor, b: torch.Tensor, scales: int = 3) -> torch.Tensor:
    """Mean L1 distance of horizontal and vertical differences at `scales` halved resolutions: edges weigh more than
    flat areas. a, b: [N, 3, H, W]."""
    total = a.new_zeros(())
    for _ in range(scales):
        for dim in (-1, -2):
            total = total + (a.diff(dim=dim) - b.diff(dim=dim)).abs().mean()
        a, b = F.avg_pool2d(a, 2), F.avg_pool2d(b, 2)
    return total / (2 * scales)


def vae_loss(vae, x: torch.Tensor) -> torch.Tensor:
    """L1 + 2 * gradient L1 + KL_WEIGHT * mean KL to N(0, 1), on posterior samples. x: [N, 3, H, W] in [-1, 1]."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        mean, logvar = vae.encoder(x).float().chunk(2, dim=1)
        logvar = logvar.clamp(-14, 6)
        z = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
        out = vae.decoder(z).float()
    kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
    return F.l1_loss(out, x) + 2 * gradient_loss(out, x) + KL_WEIGHT * kl


def train_vae(images: torch.Tensor, size: str, *, seconds: float, batch: int, max_steps: int, lr: float = 1.5e-3):
    """images: [N, 3, H, W] on the training device. Returns (averaged vae rounded to bf16 and held in float32, info)."""
    vae = models.build_vae(size).to(images.device)
    average = loop.Average({"vae": vae}, 0.998)

    def loss_fn():
        index = torch.randint(0, images.shape[0], (batch,), device=images.device)
        return vae_loss(vae, images[index])

    trainer = loop.Trainer(list(vae.parameters()), loss_fn, weight_decay=0.0)
    steps, loss = loop.run(
        trainer, average, loop.Clock(seconds), peak=lr, warmup=200, decay_from=0.3, max_steps=max_steps, log_every=500
    )
    vae = average.models["vae"].bfloat16().float()
    return vae, {"steps": steps, "loss": loss, "psnr": psnr(vae, images[:: max(1, len(images) // 512)])}


@torch.no_grad()
def psnr(vae, images: torch.Tensor) -> float:
    """Mean over pictures of 10 log10(4 / mse), dB, of decode(encode(x)); x in [-1, 1]."""
    values = []
    for x in images.split(64):
        out = vae.decode(vae.encode(x).latent_dist.mode()).sample.clamp(-1, 1)
        values.append(10 * torch.log10(4 / (out - x).square().mean(dim=(1, 2, 3))))
    return torch.cat(values).mean().item()


@torch.no_grad()
def encode_all(vae, images: torch.Tensor) -> torch.Tensor:
    """Posterior means [N, C, H/8, W/8] of all pictures."""
    return torch.cat([vae.encode(x).latent_dist.mode() for x in images.split(128)])


def set_scaling(vae, latents: torch.Tensor) -> tuple[float, float]:
    """Stores shift_factor = mean and scaling_factor = 1 / std of the latents in the config, so that
    (latents - shift) * scaling has mean 0 and variance 1."""
    shift, scale = latents.mean().item(), 1 / latents.std().item()
    vae.register_to_config(shift_factor=round(shift, 5), scaling_factor=round(scale, 5))
    return vae.config.shift_factor, vae.config.scaling_factor
