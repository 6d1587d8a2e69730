"""The HTML report: complete, self-contained, small, safe with any prompt."""

import re
from html.parser import HTMLParser

import pytest
import torch

from dq.eval import figures
from dq.eval.pictures import Encoder, difference, difference_gain
from dq.eval.report import write_report
from dq.eval.result import CandidateResult, EvalResult, Score

NAMES = ["fp8", "w4a4-int4", "w4a4-int4-convrot", "w4a4-nvfp4-svd"]


def _layer(i, sqnr):
    return {
        "component": "transformer",
        "name": f"transformer_blocks.{i}.attn.to_q",
        "shape": [256, 256],
        "weights": "int4 per channel",
        "activations": "int4 per token",
        "transforms": "rotate 256",
        "nbytes": 33792,
        "nbytes_16bit": 131072,
        "backend": "torch",
        "grid": "int4 per token",
        "calls": 480,
        "sqnr_db": sqnr,
    }


def _candidate(name, n, error):
    values = [error * (1 + 0.1 * (i % 3)) for i in range(n)]
    mean = sum(values) / n
    scores = {
        "model-error": Score("model-error", value=mean, low=0.9 * mean, high=1.1 * mean, n=n),
        "psnr": Score("psnr", higher_is_better=True, value=30.0, low=29.0, high=31.0, n=n, digits=2, values=[30.0] * n),
        "lpips": Score("lpips", reason="weight file not found"),
    }
    return CandidateResult(
        name,
        scores,
        latent_curve=[error * s for s in range(1, 21)],
        model_errors=[{"component": "transformer", "prompt": 0, "step": s, "error": error} for s in range(20)],
        layers=[_layer(i, 20.0 + i if i else None) for i in range(9)],
        nbytes=7_000_000,
        seconds=20.0,
        recipe=name,
        plan=[{"group": "attn.to_q", "weights": "int4 & more", "why": None}],
        quantize_seconds=3.0,
        notes=["a note on <this>"],
    )


@pytest.fixture(scope="module")
def result():
    n, generator = 24, torch.Generator().manual_seed(0)
    images = {"reference": torch.randint(0, 256, (n, 3, 128, 128), generator=generator).to(torch.uint8)}
    for name in NAMES:  # noise: the worst case for compression
        noise = torch.randint(-40, 41, (n, 3, 128, 128), generator=generator)
        images[name] = (images["reference"].int() + noise).clamp(0, 255).to(torch.uint8)
    prompts = ["<script>alert('x')</script> & \"quotes\" $title", *[f"prompt {i}" for i in range(1, n)]]
    return EvalResult(
        prompts,
        [_candidate(name, n, 0.01 * (i + 1)) for i, name in enumerate(NAMES)],
        settings={"seed": 5, "num_inference_steps": 20},
        environment={"date": "2026-01-01", "device": "CPU", "versions": {"torch": "2.14.1"}},
        reference_nbytes=27_000_000,
        reference_seconds=24.0,
        unavailable={"lpips": "weight file not found"},
        images=images,
    )


@pytest.fixture(scope="module")
def page(result, tmp_path_factory):
    path = result.save(tmp_path_factory.mktemp("report") / "sub" / "report.html", title="A & B")
    return path.read_text(encoding="utf-8")


class Checker(HTMLParser):
    """Collects tags, resource attributes and unbalanced elements."""

    VOID = {"meta", "img", "br", "input", "link", "path", "use", "hr"}

    def __init__(self):
        super().__init__()
        self.stack, self.resources, self.counts, self.ids, self.refs = [], [], {}, [], []

    def handle_startendtag(self, tag, attrs):
        self._look(tag, attrs)

    def handle_starttag(self, tag, attrs):
        self._look(tag, attrs)
        if tag not in self.VOID:
            self.stack.append(tag)

    def _look(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        for key, value in attrs:
            if key in ("src", "srcset", "data", "action") or (key == "href" and tag != "a" and value[:1] != "#"):
                self.resources.append(value)
            if key == "id":
                self.ids.append(value)
            if key in ("href", "xlink:href") and value.startswith("#"):
                self.refs.append(value[1:])

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.stack.pop() == tag


def test_is_well_formed_and_self_contained(page):
    checker = Checker()
    checker.feed(page)
    assert checker.stack == []
    assert all(r.startswith("data:image/") for r in checker.resources)
    assert not re.search(r"https?://|//[a-z]+\.[a-z]|@import|url\((?!#)", re.sub(r"base64,[^\"]+", "", page))
    assert len(checker.ids) == len(set(checker.ids)), "ids of inline SVGs collide"
    assert set(checker.refs) <= set(checker.ids)
    assert checker.counts["img"] == 24 * (1 + 2 * len(NAMES))
    assert "script>alert" not in page.replace("&lt;script&gt;", "")


def test_is_small_even_for_noise(page):
    assert len(page) < 10 * 2**20


def test_holds_everything(page, result):
    for text in (
        "<title>A &amp; B</title>",
        "24 prompts, 4 candidates",
        "model-error ↓",
        "psnr ↑",
        "N = 24",
        "[29.00, 31.00]",
        "lpips: not run: weight file not found",
        "a note on &lt;this&gt;",
        "26 % of the reference",
        "torch on int4 per token: 9",
        "transformer_blocks.8.attn.to_q",
        "activation grid that ran",
        "int4 &amp; more",
        "33,792",
        "prompt 23",
        "seed 28",
        "prefers-color-scheme: dark",
        "2.14.1",
    ):
        assert text in page, text
    assert all(name in page for name in NAMES)


@pytest.mark.skipif(figures.missing() is not None, reason="matplotlib is not installed")
def test_plots(page, result):
    assert list(figures.figures(result)) == [
        "model-error",
        "model-error per step",
        "latent-error per step",
        "Signal to quantization noise per layer",
    ]
    assert page.count("<svg") == 4 and "currentColor" in page and figures._INK not in page
    assert figures.figures(result) == figures.figures(result), "plots are repeatable"


def test_without_matplotlib_the_report_says_so(result, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "missing", lambda: "plots need matplotlib")
    page = write_report(result, tmp_path / "r.html", limit=2).read_text(encoding="utf-8")
    assert "<svg" not in page and "plots need matplotlib" in page and "22 more prompts are not shown" in page


def test_an_exact_candidate_and_no_layers(tmp_path):
    """Zeros on what is a logarithmic axis otherwise; nothing quantized; one prompt; no images."""
    exact = CandidateResult("same", {"model-error": Score("model-error", value=0.0, n=1)}, latent_curve=[0.0])
    page = write_report(EvalResult(["p"], [exact]), tmp_path / "r.html").read_text(encoding="utf-8")
    assert "1 prompt, 1 candidate " in page
    assert "No quantized layers" in page and "No plan" in page and "holds no images" in page


def test_difference_maps():
    black, grey = torch.zeros(3, 8, 8, dtype=torch.uint8), torch.full((3, 8, 8), 51, dtype=torch.uint8)
    assert difference(grey, black).unique().tolist() == pytest.approx([0.2])
    assert difference_gain([difference(grey, black)]) == 4
    assert difference_gain([difference(black, black)]) == 64
    assert difference_gain([]) == 64
    assert Encoder(1).heat(difference(grey, black), 4).startswith("data:image/png;base64,")


def test_large_images_are_shown_smaller():
    import base64
    import io

    image_module = pytest.importorskip("PIL.Image")
    uri = Encoder(1).image(torch.zeros(3, 1024, 512, dtype=torch.uint8))
    picture = image_module.open(io.BytesIO(base64.b64decode(uri.split(",")[1])))
    assert picture.size == (192, 384)
