"""`dq bench llm` across runs: rows that are taken over, rows that are not, and the limit of a row."""

import json
import time

import pytest

from dq.eval.bench import llm_methods, llm_rows
from dq.registry import DQError


@pytest.fixture
def run(llm, tiny, tmp_path, monkeypatch):
    """A function that runs the table on a tiny model with a row's measurement counted, and the list of those rows."""
    from dq import showcase_text

    model = tmp_path / "model"
    llm.decoder().save_pretrained(model)
    monkeypatch.setattr(showcase_text, "load_tokenizer", lambda source: llm.tokenizer())
    (tmp_path / "score.txt").write_text(llm.text)
    (tmp_path / "calib.txt").write_text(llm.text[::-1])
    done, own = [], showcase_text.Table.row

    def row(self, name, *rest):
        done.append(name)
        return own(self, name, *rest)

    monkeypatch.setattr(showcase_text.Table, "row", row)

    def call(names=("fp8", "int8"), notes=None, windows=2, kernels=False, **options):
        settings = showcase_text.Settings(
            str(model), str(tmp_path / "score.txt"), str(tmp_path / "calib.txt"), windows=windows, length=64,
            samples=2, min_features=16, device="cpu", kernels=kernels,
        )  # fmt: skip
        options = {"out": str(tmp_path / "t.json")} | options
        notes = [] if notes is None else notes
        return showcase_text.bench_llm(settings, names, note=notes.append, **options)

    return call, done


def test_rows_of_the_same_key_are_taken_over(run, tmp_path):
    call, done = run
    first = call()
    assert done == ["fp8", "int8"] and [r["recipe"] for r in first["rows"]] == ["16-bit", "fp8", "int8"]
    notes = []
    again = call(("w4a16", "fp8", "int8"), notes, resume=True)
    assert done == ["fp8", "int8", "w4a16"]
    assert [r["recipe"] for r in again["rows"]] == ["16-bit", "w4a16", "fp8", "int8"]
    assert again["rows"][2:] == first["rows"][1:] and "3 of 4 rows" in notes[0]
    # A row that is not asked for stays in the file of the same table.
    call(("fp8",), resume=True)
    assert len(json.loads((tmp_path / "t.json").read_text())["rows"]) == 4 and done[3:] == []
    call()  # without --resume: from the start
    assert done[3:] == ["fp8", "int8"]


def test_a_changed_key_measures_anew_and_says_so(run, tmp_path):
    call, done = run
    call()
    notes = []
    call(notes=notes, windows=3, resume=True)
    assert done == ["fp8", "int8"] * 2
    assert "16-bit, fp8, int8" in notes[0] and "anew" in notes[0]
    (tmp_path / "calib.txt").write_text("another text of letters. " * 100)
    call(windows=3, resume=True)
    assert len(done) == 6


def test_ratios_are_paired_by_windows(run, monkeypatch):
    """Against the formula with numbers that were worked out by hand, and of rows that are there."""
    from dq.eval.bench import llm as table
    from dq.eval.perplexity import ratio

    assert ratio([1.0, 3.0], [2.0, 2.0]) == (1.0, pytest.approx(0.5))  # residuals -1 and 1: sqrt(2 * 2) / 4
    assert ratio([2.0, 4.0, 6.0], [4.0, 8.0, 12.0]) == (0.5, 0.0)  # every window alike: nothing is uncertain
    assert ratio([3.0], [2.0]) == (1.5, None)
    monkeypatch.setattr(llm_methods, "PAIRS", (("fp8", "int8"), ("fp8", "nobody")))
    found = run[0]()
    (one,) = found["ratios"]
    rows = {r["recipe"]: r[one["score"]] for r in found["rows"][1:]}
    assert one["value"] == pytest.approx(rows["fp8"]["value"] / rows["int8"]["value"]) and one["se"] > 0
    assert (one["recipe"], one["of"], one["score"]) == ("fp8", "int8", "kl[64]")
    del rows["int8"]["sums"]  # of an earlier version
    assert table.ratios(found["rows"], llm_methods.PAIRS) == []


def test_by_kernels(run):
    """Recipes in BF16 on the grid that this machine has; the 16-bit model stays, and the key differs."""
    call, done = run
    call(("fp8",))
    found = call(("fp8",), resume=True, kernels=True)
    assert done == ["fp8", "fp8"] and found["settings"]["kernels"]
    assert found["rows"][1]["ran"] == ["torch-reference fp8_e4m3/token"]


def test_failed_rows_are_tried_again(run, tmp_path):
    call, done = run
    path = tmp_path / "t.json"
    call()
    table = json.loads(path.read_text())
    table["rows"][1] = {"recipe": "fp8", "failed": "no memory", "key": table["rows"][1]["key"]}
    path.write_text(json.dumps(table))
    found = call(resume=True)
    assert done[2:] == ["fp8"] and "failed" not in found["rows"][1]
    path.write_text("[]")
    with pytest.raises(DQError, match="no table to resume"):
        call(resume=True)
    with pytest.raises(DQError, match="--json"):
        call(resume=True, out=None)


def test_a_row_that_takes_too_long_says_so(run, monkeypatch):
    from dq import showcase_text

    call, done = run
    own = showcase_text.Table._own

    def slow(self, name, recipe):
        if name == "fp8":
            try:
                time.sleep(30)
            except Exception:  # as a library may: the limit goes through it
                return own(self, name, recipe)
        return own(self, name, recipe)

    monkeypatch.setattr(showcase_text.Table, "_own", slow)
    start = time.perf_counter()
    _, slow_row, other = call(limit=3.0)["rows"]
    assert time.perf_counter() - start < 20
    assert slow_row["failed"] == "took more than 3 s (--row-limit)" and "failed" not in other
    with pytest.raises(DQError, match="above 0"):
        call(limit=0)


def test_a_limit_that_is_not_reached_leaves_no_timer():
    import signal

    with llm_rows.limited(5):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 4
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    with pytest.raises(llm_rows.OverTime), llm_rows.limited(0.01):
        time.sleep(5)


def test_fingerprints_do_not_depend_on_the_place(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "w.bin").write_bytes(bytes(3 * llm_rows.EDGE))
    a, b = (llm_rows.fingerprint(tmp_path / n) for n in "ab")
    assert a == b
    (tmp_path / "b" / "w.bin").write_bytes(bytes(3 * llm_rows.EDGE - 1) + b"x")
    assert llm_rows.fingerprint(tmp_path / "b") != a
    assert llm_rows.fingerprint("some/hub-id") == "some/hub-id"


def test_the_rows_that_come_first_are_rows():
    assert set(llm_methods.FIRST) <= set(llm_methods.names())
    assert llm_rows.first(["a", "b", "c"], ["c", "x", "a"]) == ["c", "a", "b"]
