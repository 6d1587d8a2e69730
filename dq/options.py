"""Options that several commands take."""

from __future__ import annotations

import argparse


def add_machine(p: argparse.ArgumentParser) -> None:
    """`--dtype` and `--device`: what a model is loaded to."""
    p.add_argument("--dtype", default="bf16", help="bf16, fp16 or fp32 (default bf16)")
    p.add_argument("--device", help="cuda or cpu; default: a GPU if there is one")


def add_text(
    p: argparse.ArgumentParser, what: str, *, length: int = 2048, samples: bool = False, required: bool = False
) -> None:
    """`--text`, `--length` and, for a text that calibrates, `--samples`; `length` is what the command takes without."""
    p.add_argument("--text", metavar="FILE", required=required, help=f"UTF-8 text {what}")
    p.add_argument("--length", type=int, help=f"tokens of a window of the text (default {length})")
    if samples:
        p.add_argument("--samples", type=int, help="windows of the text (default 128)")


def add_sequential(p: argparse.ArgumentParser) -> None:
    """`--sequential`: what calibrates a block, and a linear."""
    said = "calibrate blocks on what quantized ones before them give; with `linears` every group of linears too"
    p.add_argument("--sequential", nargs="?", const=True, default=False, choices=["linears"], help=said)
