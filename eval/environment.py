"""Where an evaluation ran."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from typing import Any

import torch

from dq.version import VERSION

PACKAGES = (
    "torch",
    "diffusers",
    "transformers",
    "triton",
    "torchmetrics",
    "lpips",
    "stlpips-pytorch",
    "torchao",
    "gemlite",
)


def describe(device: torch.device | None = None) -> dict[str, Any]:
    """Return date (UTC), Python, package versions, device name and CPU threads."""
    versions = {"dq": VERSION}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    cuda = device is not None and device.type == "cuda"
    cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        "platform": f"{platform.system()}, {os.cpu_count()} CPU cores",
        "device": torch.cuda.get_device_name(device) if cuda else cpu,
        "versions": versions,
    }
