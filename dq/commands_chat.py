"""`dq chat`: a conversation with a language model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from dq.options import add_machine
from dq.registry import DQError


def add(sub: Any) -> None:
    """The subcommand and its options."""
    p = sub.add_parser("chat", help="talk to a quantized (or any) language model")
    p.add_argument("source", help="folder, GGUF file or hub id")
    p.add_argument("question", nargs="?", help="answered once; without it every line that is typed is")
    p.add_argument("--system", help="what the model is told first")
    p.add_argument("--max-new-tokens", type=int, default=256)
    p.add_argument("--sample", action="store_true", help="draw tokens as the model's settings say, not the likeliest")
    p.add_argument("--kv-cache", metavar="NAME", help="keys and values in few bits (dq list caches)")
    p.add_argument("--seed", type=int, default=0)
    add_machine(p)
    p.set_defaults(run=chat)


def chat(args: argparse.Namespace) -> None:
    """Answers in turn; what was said stays in the conversation."""
    import torch

    from dq import checks
    from dq.pipelines.chat import answer
    from dq.pipelines.importing import load
    from dq.pipelines.kv_store import kv_format
    from dq.pipelines.loading import folder_of, load_tokenizer, parse_dtype, quiet_libraries

    if args.kv_cache is not None:
        kv_format(args.kv_cache)
    checks.whole(args.max_new_tokens, "--max-new-tokens")
    checks.seed(args.seed, "--seed")
    dtype = parse_dtype(args.dtype)
    folder_of(args.source)
    tokenizer = load_tokenizer(args.source)
    if not getattr(tokenizer, "chat_template", None):
        raise DQError(f"the tokenizer of {args.source} has no chat template; dq generate continues a text without one")
    quiet_libraries()
    model = load(args.source, dtype, args.device)
    if not (hasattr(model, "can_generate") and model.can_generate()):
        raise DQError(f"{args.source} is a {type(model).__name__}, no language model that answers")
    torch.manual_seed(args.seed)
    options = {"tokens": args.max_new_tokens, "sample": args.sample, "kv_cache": args.kv_cache}
    said = [{"role": "system", "content": args.system}] if args.system else []
    for question in [args.question] if args.question is not None else _lines():
        said.append({"role": "user", "content": question})
        said.append({"role": "assistant", "content": answer(model, tokenizer, said, **options)})


def _lines() -> Iterator[str]:
    """What is typed, or comes through a pipe, line by line."""
    asks = sys.stdin.isatty()
    while True:
        if asks:
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()
