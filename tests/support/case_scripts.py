"""Scripts of cases, run in processes of their own: Triton reads TRITON_INTERPRET when kernels are defined."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def compare(script: Path, device: str, shares: int = 1, **environment: str) -> None:
    """Runs `script device i shares` for every share i at once, with dq from this checkout; all have to agree."""
    pytest.importorskip("triton", reason="triton is not installed")
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    threads = str(max(1, (os.cpu_count() or 1) // shares))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": threads, **environment}
    calls = [[sys.executable, str(script), device, str(i), str(shares)] for i in range(shares)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    runs = [subprocess.Popen(call, env=env, **pipes) for call in calls]
    outputs = [run.communicate()[0] for run in runs]
    assert not any(run.returncode for run in runs), "".join(outputs)
