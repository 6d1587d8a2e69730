"""Tables of the benches: rows kept one by one, resumed, compared in pairs."""

import json

import numpy as np
import pytest

from dq.cli import main
from dq.eval.bench import methods
from dq.eval.bench.table import RowFile, against, row, text
from dq.eval.bootstrap import mean_interval, ratio_interval
from dq.eval.compare import evaluate
from dq.eval.result import CandidateResult, Score
from dq.registry import DQError


def measured(name, errors, steps=9):
    """A row as `row` makes it."""
    found = CandidateResult(
        name, {"model-error": Score("model-error", value=float(np.mean(errors)), low=0.0, high=1.0)}
    )
    found.model_errors = [dict(component="x", prompt=i % 2, step=i % steps, error=e) for i, e in enumerate(errors)]
    return row(found, method=name, bits=4.5, recipe={"name": name})


def test_ratio_intervals_are_paired():
    """Calls differ tenfold, methods by a tenth on each: pairs tell them apart, separate intervals do not."""
    rng = np.random.default_rng(0)
    hard = rng.exponential(size=60) + 0.1
    better = 0.9 * hard * (1 + 0.02 * rng.normal(size=60))
    low, high = ratio_interval(better, hard)
    assert low < 0.9 < high < 0.92 and low > 0.88
    assert mean_interval(better)[1] > mean_interval(hard)[0]
    assert ratio_interval([1.0, 2.0], [1.0, 2.0]) is None
    assert ratio_interval(3 * hard, hard) == (pytest.approx(3.0), pytest.approx(3.0))


def test_against_a_row_and_by_parts_of_the_steps():
    table = [measured("base", [1.0] * 18), measured("late", ([1.0] * 6 + [3.0] * 3) * 2)]
    against(table, "method", "base")
    late = table[1]
    assert late["of yardstick"]["value"] == pytest.approx(30 / 18) and late["of yardstick"]["n"] == 18
    assert [late[p]["value"] for p in ("early", "middle", "late")] == [1.0, 1.0, 3.0]
    assert table[0]["of yardstick"] == {"value": 1.0, "low": 1.0, "high": 1.0, "n": 18}
    shown = text(table, {"method": None, "bits": 2})
    assert "1.667" in shown.splitlines()[2] and "of yardstick" in shown.splitlines()[0]
    with pytest.raises(DQError, match=r"no row 'bas'.*base"):
        against(table, "method", "bas")
    with pytest.raises(DQError, match="late and base were measured on different calls"):
        against([table[0], measured("late", [1.0] * 17)], "method", "base")


def test_rows_are_kept_one_by_one_and_taken_over(tmp_path):
    path, head = tmp_path / "t.json", {"title": "one"}
    file = RowFile(str(path), head, "method")
    file.add(measured("a", [1.0]))
    assert [r["method"] for r in json.loads(path.read_text())["rows"]] == ["a"]
    file.add(measured("b", [2.0]))
    again = RowFile(str(path), head, "method", resume=True)
    assert again.known("a", {"name": "a"})["calls"] == [[0, 0, 1.0]] and list(again.rows) == ["a", "b"]
    assert again.known("a", {"name": "changed"}) is None and again.known("c", {}) is None
    assert RowFile(str(path), head, "method").rows == {}, "not asked to resume"
    with pytest.raises(DQError, match=r"holds another table \(one\)"):
        RowFile(str(path), {"title": "two"}, "method", resume=True)
    path.write_text("{]")
    with pytest.raises(DQError, match="holds no table to resume"):
        RowFile(str(path), head, "method", resume=True)
    with pytest.raises(DQError, match="--resume continues the file of --json"):
        RowFile(None, head, "method", resume=True)


def test_evaluate_hands_out_each_result_when_it_is_there(flux, altered, prompts, call):
    """What a bench writes down before the next candidate begins."""
    seen = []

    def broken():
        assert seen == ["one"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate({"one": altered(0.1), "two": broken}, flux, prompts[:1], [], kwargs=call, progress=False,
                 done=lambda found: seen.append(found.name))  # fmt: skip


def test_every_recipe_of_the_benches_is_one():
    for name in (*methods.names(), *methods.CALIBRATED):
        assert methods.recipe(name).linear is not None
    assert all(methods.recipe(name).needs_calibration for name in methods.CALIBRATED)
    with pytest.raises(DQError, match=r"unknown method 'nvfp4 gptk'.*nvfp4 gptq"):
        methods.recipe("nvfp4 gptk")


def rows_of_a_bench(monkeypatch, tmp_path, flux, altered, *args):
    """`dq bench ...` on a tiny pipeline that is quantized for real; names of those that were."""
    from dq import showcase
    from dq.pipelines.calibration import Prompts

    done, original = [], showcase.quantize

    def quantize(pipe, recipe, **kwargs):
        done.append(recipe.name)
        return original(pipe, recipe.with_(min_features=16), **kwargs)

    small = dict(height=32, width=32, num_inference_steps=3, max_sequence_length=8, guidance_scale=2.0)
    monkeypatch.setattr(showcase, "quantize", quantize)
    monkeypatch.setattr(showcase, "demo_pipeline", lambda *a: altered(0.0))
    monkeypatch.setattr(showcase, "demo_kwargs", lambda: dict(small))
    monkeypatch.setattr(showcase, "demo_prompts", lambda n: ["a red cat", "a blue dog"][:n] + ["red sun"] * (n - 2))
    monkeypatch.setattr(showcase, "CALIBRATION_PROMPTS", 2)
    monkeypatch.setattr(
        showcase, "demo_calibration", lambda: Prompts(["red sun"], steps=3, height=32, width=32, max_sequence_length=8)
    )
    assert main(["bench", *args, "--device", "cpu", "--prompts", "1", "--records", "3", "--json",
                 str(tmp_path / "t.json"), "--resume"]) == 0  # fmt: skip
    return done


def test_bench_methods_resumes(monkeypatch, tmp_path, flux, altered, capsys):
    bench = lambda *only: rows_of_a_bench(monkeypatch, tmp_path, flux, altered, "methods", "--only", *only)  # noqa: E731
    assert bench("int8", "nvfp4 naive") == ["int8", "nvfp4 naive"]
    assert bench("int8", "int4 naive", "nvfp4 naive", "--against", "int8") == ["int4 naive"]
    out = capsys.readouterr().out
    assert "of yardstick" in out and "late" in out
    rows = json.loads((tmp_path / "t.json").read_text())["rows"]
    assert [r["method"] for r in rows] == ["int8", "nvfp4 naive", "int4 naive"] and len(rows[0]["calls"]) == 3


def test_bench_calibration_resumes(monkeypatch, tmp_path, flux, altered, capsys):
    run = lambda *recipes: rows_of_a_bench(monkeypatch, tmp_path, flux, altered, "calibration", "--recipes", *recipes)  # noqa: E731
    assert run("int8 static") == ["int8 static"] * 5
    assert run("int8 static", "fp8-static") == ["fp8-static"] * 5
    out = capsys.readouterr().out
    assert "int8 static, first step" in out and "of all" in out
    rows = json.loads((tmp_path / "t.json").read_text())["rows"]
    assert {r["calibration records"] for r in rows} == {4}  # two prompts and branches of one step
