"""`dq bench`: SQNRs against relative MSEs (x 1e-3) computed independently, and the shape of both reports."""

import contextlib
import json
import math
from types import SimpleNamespace

import pytest
import torch

from dq.cli import main
from dq.eval.bench import activation, formats, kernel_table, kernels, speed
from dq.qtensor import quantize
from dq.spec import QuantSpec

# Computed in numpy by another implementation on Gaussian, Laplace, Student-t5 and outlier data of its own.
NVFP4 = {
    ("absmax", ""): (9.05, 8.55, 8.51, 5.26),
    ("sweep", ""): (6.59, 6.77, 6.74, 4.71),
    ("sweep", "run in E4M3"): (6.93, 7.16, 7.12, 5.16),
    ("sweep", "target e4m3, run in E4M3"): (6.67, 6.86, 6.83, 4.95),
    ("sweep", "target e4m3, run natively"): (6.92, 7.15, 7.09, 5.19),
    ("exact", ""): (8.23, 8.62, 8.48, 7.49),
    ("4over6", ""): (7.53, 7.50, 7.56),
    ("absmax", "rotated by 16"): (8.98, 9.25, 9.20),
    ("sweep", "rotated by 16"): (6.64, 6.60, 6.63),
    ("absmax", "and its residual in nvfp4"): (0.075, 0.071, 0.073),
}
OTHERS = {
    ("nvint4", "absmax"): (7.48, 10.5, 10.5),
    ("int4/group128", "absmax"): (13.95, 26.3, 29.8),
    ("int4/group16", "absmax"): (7.33, 10.2, 10.2),
    ("mxfp4", "floor"): (13.4, 16.2, 15.8),
    ("mxfp4", "rceil"): (13.4, 17.5, 17.4),
    ("mxfp4", "even"): (12.6, 15.5, 15.1),
    ("mxfp4", "best2"): (12.6, 15.3, 14.8),
    ("mxfp8", "rceil"): (0.704, 0.695, 0.693),
}
EXPECTED = {("nvfp4", *key): value for key, value in NVFP4.items()}
EXPECTED |= {(name, rule, ""): value for (name, rule), value in OTHERS.items()}


@pytest.fixture(scope="module")
def tensors():
    """Many rows: of the columns with outliers few values hold most of the energy."""
    return list(formats.data(256, 1).values())


@pytest.mark.parametrize("key", EXPECTED, ids=" ".join)
def test_sqnr(key, tensors):
    row = next(r for r in formats.rows() if (r.name, r.spec.scale_rule, r.note) == key)
    for x, relative in zip(tensors, EXPECTED[key], strict=False):
        assert formats.sqnr_db(x, row.apply(x, row.spec)) == pytest.approx(-10 * math.log10(relative / 1e3), abs=0.2)


def test_target_e4m3_loses_little(tensors):
    """Executed in E4M3: within 2 % of the MSE of the free sweep, 6 % on column outliers (there over more rows)."""
    free = QuantSpec.parse("nvfp4@sweep")
    bound = free.with_(rule_params=(("target", "e4m3"),))
    gauss, laplace, t5, outliers, _ = tensors
    many = torch.cat([outliers, formats.data(256, 2)["outliers"]])
    for x, share in ((gauss, 1.02), (laplace, 1.02), (t5, 1.02), (many, 1.06)):
        least = formats.sqnr_db(x, quantize(x, free).dequantize())
        assert formats.sqnr_db(x, formats.executed(x, bound)) >= least - 10 * math.log10(share)


def test_every_format_has_rows():
    """No format that weights can have is missing, and a row says what it is."""
    keys = [(r.name, r.spec.scale_rule, r.note) for r in formats.rows()]
    assert len(keys) == len(set(keys))
    assert {"nvfp4", "mxfp4", "mxfp6", "mxfp8", "mxint8", "nf4", "fp8-block", "int4/group64"} <= {k[0] for k in keys}
    assert all(r.bits > 1 for r in formats.rows())


def test_formats_command(tmp_path, capsys, monkeypatch):
    few = [r for r in formats.rows() if r.name in ("nvfp4", "fp8-block") and r.spec.scale_rule == "absmax"]
    monkeypatch.setattr(formats, "rows", lambda: iter(few))
    files = [str(tmp_path / n) for n in ("a.md", "a.json")]
    assert main(["bench", "formats", "--rows", "2", "--seed", "3", "--markdown", files[0], "--json", files[1]]) == 0
    out = capsys.readouterr().out
    assert "seed 3" in out and "8192 values" in out and "fp8-block" in out
    result = json.loads((tmp_path / "a.json").read_text())
    assert result["environment"]["versions"]["torch"] in torch.__version__
    assert {tuple(r["sqnr_db"]) for r in result["rows"]} == {tuple(formats.COLUMNS)}
    assert "--rows 2 --seed 3" in (tmp_path / "a.md").read_text()


def test_data_is_repeatable():
    a, b = formats.data(1, 5), formats.data(1, 5)
    assert all(torch.equal(a[k], b[k]) for k in formats.COLUMNS)
    assert torch.isfinite(torch.stack(list(a.values()))).all()


def test_quantize_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(speed, "copy_bandwidth", lambda device, repeat: 1e9)
    path = tmp_path / "q.json"
    specs = ["nvfp4", "nvfp4@sweep:e4m3", "int8/channel"]
    argv = ["bench", "quantize", "--shape", "32", "64", "--specs", *specs, "--repeat", "1", "--device", "cpu"]
    assert main([*argv, "--reference", "--json", str(path)]) == 0
    assert "32 x 64 bfloat16" in capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    assert [r["spec"] for r in rows] == specs
    assert rows[0]["bytes"] == 32 * 64 * 2 + 32 * 64 // 2 + 32 * 4 + 4  # read BF16; write codes, scales, global scale
    assert rows[0]["floor_us"] == pytest.approx(rows[0]["bytes"] / 1e3)
    assert all(r["ratio"] > 0 and r["reference_us"] > 0 for r in rows)


def test_unknown_target_is_one_line(capsys):
    assert (
        main(["bench", "quantize", "--shape", "8", "16", "--specs", "nvfp5", "--device", "cpu", "--repeat", "1"]) == 2
    )
    assert "did you mean" in capsys.readouterr().err


def test_activation_table(monkeypatch):
    monkeypatch.setattr(activation, "copy_bandwidth", lambda device, repeat: 1e9)
    result = activation.measure(((2, 256),), "cpu", repeat=1)
    assert [r["grid"] for r in result["rows"]] == [g for g, _ in activation.GRIDS]
    assert all(r["floor_us"] == pytest.approx(2 * 256 * 3 / 1e3) and r["rotate"] > 0 for r in result["rows"])
    assert "2 x 256" in activation.text(result) and "(1.00)" in activation.text(result)


def test_kernels_report(tmp_path, capsys):
    """On a small CPU problem the error of the operands is that of BF16, of the layer that of its grids."""
    out, page = tmp_path / "k.json", tmp_path / "k.md"
    assert main(["bench", "kernels", "--divide", "48", "--repeat", "1", "--device", "cpu", "--models", "flux",
                 "--engines", "fp8", "w4a4-nvfp4-svd", "w4a16 g64", "--json", str(out),
                 "--markdown", str(page)]) == 0  # fmt: skip
    result = json.loads(out.read_text())
    assert {"dq", "torch"} <= set(result["environment"]["versions"])
    rows = [r for r in result["rows"] if (r["k"], r["n"]) == (64, 256)]
    assert [r["engine"] for r in rows] == ["bf16", "fp8", "w4a4-nvfp4-svd", "w4a16 g64"]
    assert all(r["error"] < 3e-3 and r["us"] > 0 and r["ratio"] > 0 and r["limit"] > 0 for r in rows)
    assert rows[1]["layer"] < 0.06 < rows[2]["layer"] < 0.2
    assert "flux: M 96, K 64, N 256" in capsys.readouterr().out
    lines = page.read_text().splitlines()
    assert lines[2] == "flux, M = 96" and lines[4].startswith("| engine | kernel | 64 -> 64 | 64 -> 192 | 64 -> 256 |")
    assert lines[6].startswith("| `bf16` | torch | ") and f" (1.00x, {rows[0]['limit']:.0%})" in lines[6]
    assert len({line.count("|") for line in lines[4:]}) == 1 and lines[7].startswith("| `fp8` | ")


def test_kernel_table_of_failures():
    """Every cell stays in its row, and a failure without a message is told from a shape that was not tried."""
    shape = dict(model="m", m=1, k=64, n=64)
    rows = [shape | dict(engine="a|b", failed="no | such\r\nthing <x>"), shape | dict(engine="c", failed="")]
    rows.append(shape | dict(k=128, engine="c", failed="late"))
    result = dict(ceilings=dict(bandwidth=1, bf16=1, fp8=1), environment=dict(device="d", versions={}), repeat=1)
    lines = kernel_table.markdown(result | dict(rows=rows)).splitlines()[4:]
    assert lines[2:] == ["| `a/b` |  | no / such thing (x) |  |  |", "| `c` |  | failed | late |  |"]
    assert len({line.count("|") for line in lines}) == 1
    assert kernel_table.text(rows).splitlines()[3].split() == ["a|b", "no", "|", "such", "thing", "<x>"]


@pytest.mark.parametrize(("option", "word"), [("--models", "fluxx"), ("--engines", "fp9"), ("--peers", "torcha")])
def test_kernels_refuses_unknown_words(option, word, capsys):
    assert main(["bench", "kernels", "--device", "cpu", option, word]) == 2
    assert f"{word!r}; did you mean" in capsys.readouterr().err


class _Clock:
    """A GPU whose graphs take the seconds that their calls ask for; a call may refuse to be captured, or fail."""

    def __init__(self, monkeypatch):
        self.now, self.capturing, self.order = 0.0, None, []
        clock = self

        class Event:
            def __init__(self, **_):
                self.at = None

            def record(self):
                self.at = clock.now

            def elapsed_time(self, end):
                return 1e3 * (end.at - self.at)

        class Graph:
            def replay(self):
                for call in self.calls:
                    call()

        @contextlib.contextmanager
        def graph(one, pool=None):
            clock.capturing = one
            one.calls = []
            yield
            clock.capturing = None

        fakes = dict(
            Event=Event, CUDAGraph=Graph, graph=graph, synchronize=lambda *_: None, graph_pool_handle=lambda: 0
        )
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def call(self, seconds, refuses=False):
        def run():
            if self.capturing is None:
                self.now += seconds
                self.order.append(seconds)
            elif refuses:
                self.capturing = None
                raise RuntimeError("it waits for the device")
            else:
                self.capturing.calls.append(run)
            return torch.ones(1)

        return run


def test_engines_of_a_shape_are_timed_in_turns(monkeypatch):
    """Seconds of one call of each, in a new order every round; a library may fail, dq may not."""
    clock = _Clock(monkeypatch)
    problem = SimpleNamespace(m=8, n=16, k=32, bandwidth=1e9, device=SimpleNamespace(type="cuda"), exact=torch.ones(1))
    broken = lambda: (_ for _ in ()).throw(ValueError("no such shape\nmore"))  # noqa: E731
    lines = [
        kernels._Line("bf16", [clock.call(4.0), clock.call(2.0)], 1e9, 1, {}),
        kernels._Line("waits", [clock.call(8.0, refuses=True)] * 3, 1e9, 1, {}, False),
        kernels._Line("broken", [broken], 1e9, 1, {}, True),
        kernels._Line("exact", [clock.call(16.0)], 1e9, 1, {}, True),
    ]
    rows = kernels._measured(problem, lines, 9)
    assert [r["engine"] for r in rows] == ["bf16", "waits", "broken", "exact"]
    assert [r.get("us") for r in rows] == pytest.approx([3e6, 8e6, None, 16e6])
    assert [r["ratio"] for r in rows if "us" in r] == pytest.approx([1, 3 / 8, 3 / 16])
    assert rows[2]["failed"] == "no such shape" and rows[3]["layer"] == 0
    rounds = "".join({4.0: "a", 2.0: "", 8.0: "b", 16.0: "c"}[s] for s in clock.order[-36:])
    assert all(set(rounds[i : i + 3]) == set("abc") for i in range(0, 27, 3))
    assert len({rounds[i : i + 3] for i in range(0, 27, 3)}) > 2
    with pytest.raises(ValueError, match="no such shape"):
        kernels._measured(problem, [kernels._Line("fp8", [broken], 1e9, 1, {})], 1)


def test_ratios_are_of_rounds():
    """Of a chip that slows by rounds, twice as slow in the end, the ratio stays; its spread is that of the rounds."""
    problem = SimpleNamespace(m=8, n=16, k=32, bandwidth=1e9)
    line = kernels._Line("fp8", [], 1e9, 1, {})
    row = kernels._row(problem, line, [1.0, 1.25, 1.5, 1.75, 2.0], [2.0, 2.5, 3.0, 3.5, 4.0])
    assert row["ratio"] == 2.0 and row["ratio_spread"] == 0.0 and row["us"] == 1.5e6
    row = kernels._row(problem, line, [1.0] * 5, [1.0, 1.1, 1.2, 1.3, 1.4])
    assert row["ratio"] == pytest.approx(1.2) and row["ratio_spread"] == pytest.approx(0.15)


def test_a_run_that_stops_keeps_its_shapes(tmp_path, capsys, monkeypatch):
    """Rows are printed and written shape by shape."""
    made, real = [], kernels.Problem

    def problem(*args):
        made.append(args)
        if len(made) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(kernels, "Problem", problem)
    out = tmp_path / "k.json"
    command = ["bench", "kernels", "--divide", "48", "--repeat", "1", "--device", "cpu", "--models", "flux",
               "--engines", "fp8", "--peers", "--json", str(out)]  # fmt: skip
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        main(command)
    rows = json.loads(out.read_text())["rows"]
    assert [(r["k"], r["n"]) for r in rows[::2]] == [(64, 64), (64, 192)] and len(rows) == 4
    assert capsys.readouterr().out.count("flux: M 96") == 2


def test_every_engine_is_a_layer():
    problem = kernels.Problem(4, 256, 256, torch.device("cpu"))
    for engine in kernels.ENGINES:
        params = problem.layer(engine).params
        y = kernels.choose_backend(params, problem.device, torch.bfloat16).backend.run(problem.x, params)
        assert kernels.relative(y, problem.defined(params, str(params.activations or "16-bit"))) < 3e-3, engine


def test_step(tmp_path, capsys):
    """Random weights of a tiny FLUX: the quantized step is near the 16-bit one, every way to call it has its time."""
    file = tmp_path / "step.json"
    where = ["--shape", "flux-tiny", "--repeat", "1", "--device", "cpu", "--eager", "--json", str(file)]
    assert main(["bench", "step", "--recipes", "fp8", *where]) == 0
    base, row = json.loads(file.read_text())["rows"]
    assert base["cosine"] == pytest.approx(1.0) and base["eager_ms"] > 0 and "compiled_ms" not in base
    assert row["engine"] == "fp8" and row["cosine"] > 0.99
    assert "eager_ms" in capsys.readouterr().out
    assert main(["bench", "step", "--recipes", "int8-smooth", *where]) == 2
    assert main(["bench", "step", "--recipes", "fp8", *where, "--shape", "flux-1"]) == 2
    assert "flux.1-dev" in capsys.readouterr().err
