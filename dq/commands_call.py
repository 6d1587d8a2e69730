"""How commands call a pipeline: the options, and the keyword arguments that they make."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

# Option -> argument of `__call__`, of which there are others in Python.
_ARGUMENTS = {
    "steps": "num_inference_steps", "guidance_scale": "guidance_scale", "true_cfg_scale": "true_cfg_scale",
    "negative_prompt": "negative_prompt", "height": "height", "width": "width", "num_frames": "num_frames",
    "max_sequence_length": "max_sequence_length",
}  # fmt: skip
OPTIONS = (*_ARGUMENTS, "demo_kwargs")


def add_call(p: argparse.ArgumentParser) -> None:
    """The options."""
    group = p.add_argument_group("pipeline call")
    group.add_argument("--steps", type=int, help="denoising steps")
    group.add_argument("--guidance-scale", type=float)
    group.add_argument("--true-cfg-scale", type=float)
    group.add_argument("--negative-prompt")
    group.add_argument("--height", type=int)
    group.add_argument("--width", type=int)
    group.add_argument("--num-frames", type=int, help="of a video; dq generate and dq eval make pictures, which is 1")
    group.add_argument("--max-sequence-length", type=int)
    group.add_argument("--demo-kwargs", action="store_true", help="start from dq.demo_kwargs() (128 px, 20 steps)")
    group.add_argument("--seed", type=int, default=0)


def call_kwargs(args: argparse.Namespace, sources: Sequence[str], steps: str = "num_inference_steps") -> dict:
    """Keyword arguments of the pipeline call that were given, on top of the demo's own if one of the sources is the
    demo or was made from it; the number of steps is called `steps`."""
    from dq.pipelines.demo import demo_kwargs
    from dq.pipelines.loading import is_demo

    kwargs = demo_kwargs() if args.demo_kwargs or any(is_demo(s) for s in sources) else {}
    kwargs |= {name: getattr(args, o) for o, name in _ARGUMENTS.items() if getattr(args, o) is not None}
    if "num_inference_steps" in kwargs:
        kwargs[steps] = kwargs.pop("num_inference_steps")
    return kwargs
