"""The demo model: a small trained FluxPipeline that ships with dq. MODEL_CARD.md beside this file describes it."""

from __future__ import annotations

import os

from dq.registry import DQError

_HERE = os.path.dirname(os.path.abspath(__file__))


def demo_path() -> str:
    """The folder to give to `FluxPipeline.from_pretrained`.

    Raises:
        DQError: if the package was installed without its data files.
    """
    path = os.path.join(_HERE, "weights")
    if not os.path.isfile(os.path.join(path, "model_index.json")):
        raise DQError(f"the demo weights are not in {path}; install dq again, with its data files")
    return path


def demo_kwargs() -> dict:
    """What every call of the demo pipeline needs: FluxPipeline's own defaults are 1024 px and 512 text tokens, the demo
    was trained at 128 px and 32 tokens."""
    return {
        "height": 128,
        "width": 128,
        "num_inference_steps": 20,
        "max_sequence_length": 32,
        "guidance_scale": 2.0,
    }


def demo_prompts(n: int = 24) -> list[str]:
    """The first `n` of the 256 captions in prompts.txt, all seen in training; neighbours are of different categories.

    Raises:
        DQError: if `n` is not between 1 and 256.
    """
    with open(os.path.join(_HERE, "prompts.txt"), encoding="utf-8") as f:
        prompts = f.read().splitlines()
    if not 1 <= n <= len(prompts):
        raise DQError(f"there are 1 to {len(prompts)} demo prompts, not {n}")
    return prompts[:n]
