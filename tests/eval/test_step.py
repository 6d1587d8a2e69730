"""`dq bench step` on the small shape: a row per recipe, with the kernels that ran."""

import json

import pytest

from dq.cli import main


def test_a_step_is_timed(tmp_path, capsys):
    pytest.importorskip("diffusers")
    out = tmp_path / "step.json"
    main(["bench", "step", "--shape", "flux-tiny", "--eager", "--repeat", "1", "--recipes", "fp8", "--device", "cpu",
          "--json", str(out)])  # fmt: skip
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 2 and "fp8" in capsys.readouterr().out
    assert "torch-reference" in json.dumps(rows[1])
