"""Trains the demo pipeline in resumable pieces.

    python -m dq.pipelines.demo.train prepare --data emoji_noto64.npz --tokenizers tok
    python -m dq.pipelines.demo.train vae     --data ... --tokenizers tok --out s1 --max-seconds 90
    python -m dq.pipelines.demo.train flow    --data ... --tokenizers tok --resume s1 --out s2 --max-seconds 400
    python -m dq.pipelines.demo.train distill --data ... --tokenizers tok --resume s2 --out s3 --max-seconds 120
    python -m dq.pipelines.demo.train export  --tokenizers tok --resume s3 --out weights

A state folder holds the averaged weights in bf16; a resumed piece restarts Adam with a short warm-up.
"""

from __future__ import annotations

import argparse
import time

import torch

from . import data as data_module
from . import flow, loop, models, state, text, vae

START = time.monotonic()


def parse_args(argv=None):
    """The command line; `--help` prints the module's docstring."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("phase", choices=["prepare", "vae", "flow", "distill", "export"])
    p.add_argument("--data", help="the npz with images, caption, tags, category, skin_variant")
    p.add_argument("--tokenizers", required=True, help="folder made by `prepare`")
    p.add_argument("--resume", help="state folder to start from")
    p.add_argument("--out", help="state folder to write (or, for export, the pipeline folder)")
    p.add_argument("--max-seconds", type=float, default=400, help="for the whole piece, start-up included")
    p.add_argument("--max-steps", type=int, default=1_000_000)
    p.add_argument("--batch", type=int, default=512)
    p.add_argument("--lr", type=float, default=None)
    p.add_argument("--decay-from", type=float, default=1.0, help="part of the time after which the rate decays")
    p.add_argument("--ema", type=float, default=0.999)
    p.add_argument("--log-every", type=int, default=500)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--size", choices=sorted(models.SIZES), default="demo")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--no-compile", action="store_true")
    p.add_argument("--sdpa", choices=["flash", "math"], default="flash", help="attention kernel while training on CUDA")
    p.add_argument("--no-graph", action="store_true", help="eager steps instead of one CUDA graph")
    return p.parse_args(argv)


def seconds_left(args) -> float:
    """Of --max-seconds, since `main` began."""
    return args.max_seconds - (time.monotonic() - START)


def phase_prepare(args):
    """Trains both tokenizers."""
    sizes = models.SIZES[args.size]
    texts = data_module.load_data(args.data).texts
    text.train_tokenizers(texts, sizes["clip_vocab"], sizes["t5_vocab"], args.tokenizers)


def phase_vae(args):
    """Trains the autoencoder and writes the first state folder."""
    data = data_module.load_data(args.data)
    images = data_module.images_to_tensor(data.images, models.IMAGE_SIZE, args.device)
    model, info = vae.train_vae(
        images, args.size, seconds=seconds_left(args), batch=args.batch, max_steps=args.max_steps, lr=args.lr or 1e-3
    )
    shift, scale = vae.set_scaling(model, vae.encode_all(model, images))
    meta = {"size": args.size, "seed": args.seed, "shift_factor": shift, "scaling_factor": scale}
    state.save_state(args.out, {"vae": model}, {**meta, "pieces": [{"phase": "vae", **info}]})
    print(f"vae {info} shift {shift} scale {scale}", flush=True)


def encode_latents(args, data, model, meta) -> torch.Tensor:
    """Packed, normalised latents [N, tokens, channels] of all pictures on the device."""
    images = data_module.images_to_tensor(data.images, models.IMAGE_SIZE, args.device)
    latents = vae.encode_all(model.to(args.device), images)
    return flow.pack((latents - meta["shift_factor"]) * meta["scaling_factor"])


class Saver:
    """Writes the state folder: when called, and at most once a minute through `sometimes`."""

    def __init__(self, args, meta: dict, model):
        self.args, self.meta, self.vae, self.last = args, meta, model, time.monotonic()

    def __call__(self, steps: int, loss: float, averaged: dict):
        args = self.args
        piece = {"phase": args.phase, "steps": steps, "loss": loss, "batch": args.batch, "seed": args.seed}
        meta = {**self.meta, "pieces": self.meta["pieces"] + [piece]}
        state.save_state(args.out, {**averaged, "vae": self.vae}, meta)
        self.last = time.monotonic()

    def sometimes(self, steps: int, loss: float, averaged: dict):
        """Saves if the last time is a minute ago."""
        if time.monotonic() - self.last > 60:
            self(steps, loss, averaged)


def load_modules(args, parts, meta, frozen: bool = False) -> dict:
    """Transformer and text encoders on the device, from the state if it has them."""
    modules = state.build_modules(meta["size"], args.tokenizers, args.device)
    state.restore(modules, parts)
    for module in modules.values() if frozen else ():
        module.eval().requires_grad_(False)
    return modules


def phase_train(args):
    """Flow matching or guidance distillation, from one state folder to another."""
    data = data_module.load_data(args.data)
    parts, meta = state.load_state(args.resume)
    model = models.build_vae(meta["size"])
    model.load_state_dict(parts["vae"])
    latents = encode_latents(args, data, model, meta)
    prompts = flow.Prompts(data, args.tokenizers, args.device)
    teacher = load_modules(args, parts, meta, frozen=True) if args.phase == "distill" else None
    print(f"{args.phase}: setup {time.monotonic() - START:.0f} s, prompt ids checksum {prompts.checksum}", flush=True)
    save = Saver(args, meta, model)
    cuda = args.device.startswith("cuda")
    result = flow.train(
        load_modules(args, parts, meta),
        teacher,
        prompts,
        latents,
        batch=args.batch,
        ema=args.ema,
        compiled=cuda and not args.no_compile,
        graph=not args.no_graph,
        on_log=save.sometimes,
        clock=loop.Clock(seconds_left(args) - 4),
        peak=args.lr or (2e-4 if teacher else 1e-3),
        warmup=300 if args.max_steps > 1000 else 2,
        decay_from=args.decay_from,
        max_steps=args.max_steps,
        log_every=args.log_every,
    )
    save(*result)
    print(f"{args.phase}: {result[0]} steps, loss {result[1]:.5f}, {time.monotonic() - START:.0f} s", flush=True)


def main(argv=None):
    """Runs one phase."""
    global START
    START = time.monotonic()
    args = parse_args(argv)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    # torch 2.11 prefers cuDNN attention, whose backward reads out of bounds here when it is compiled (96 tokens)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_flash_sdp(args.sdpa == "flash")
    torch.backends.cuda.enable_mem_efficient_sdp(args.sdpa == "flash")
    if args.phase == "prepare":
        phase_prepare(args)
    elif args.phase == "vae":
        phase_vae(args)
    elif args.phase == "export":
        state.export(args.resume, args.tokenizers, args.out)
    else:
        phase_train(args)


if __name__ == "__main__":
    main()
