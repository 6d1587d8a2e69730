"""evaluate() on a real, tiny FluxPipeline and on small stand-ins for other kinds of pipelines."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dq.eval.compare import evaluate
from dq.eval.denoiser import Recorder, replay
from dq.eval.generate import Settings, generate
from dq.eval.images import load_images, save_images
from dq.registry import DQError

FAST = ["psnr"]


@pytest.fixture(scope="module")
def result(flux, altered, inputs):
    """One evaluation with every metric, looked at from many sides."""
    prompts, call = inputs
    candidates = {
        "big": lambda: altered(0.2),
        "same": altered(),
        "small": lambda: (altered(0.02), SimpleNamespace(recipe="r", seconds=1.5, plan="the plan")),
    }
    return evaluate(candidates, flux, prompts, kwargs=call, batch_size=2, records=8, progress=False)


def test_an_identical_copy_has_error_zero(result):
    same = result["same"]
    assert same.scores["model-error"].value == 0.0
    assert same.scores["latent-error"].value == 0.0
    assert same.latent_curve == [0.0, 0.0, 0.0]
    assert same.scores["psnr"].values == [100.0] * 5
    assert torch.equal(result.images["same"], result.images["reference"])


def test_more_noise_ranks_lower_in_every_score(result):
    assert result.ranking() == ["same", "small", "big"]
    for name in ("model-error", "latent-error", "psnr", "ssim", "st-lpips", "fd-alex"):
        small, big = result["small"].scores[name], result["big"].scores[name]
        if small.value is not None:
            assert (small.value > big.value) == small.higher_is_better, name
            assert small.low <= small.value <= small.high or name == "fd-alex"


def test_model_error_is_the_relative_squared_error(result):
    """Weights off by 2 and 20 %: the error grows with the square."""
    small, big = (result[n].scores["model-error"].value for n in ("small", "big"))
    assert 50 < big / small < 150
    rows = result["small"].model_errors
    assert len(rows) == 8 and {r["step"] for r in rows} == {0, 1, 2} and len({r["prompt"] for r in rows}) >= 3


def test_counts_costs_and_reports(result):
    small = result["small"]
    assert (small.scores["psnr"].n, small.scores["model-error"].n, small.scores["latent-error"].n) == (5, 8, 5)
    assert small.nbytes == result.reference_nbytes > 0 and small.seconds > 0
    assert (small.recipe, small.quantize_seconds, small.plan) == ("r", 1.5, "the plan")
    assert set(result.unavailable) <= {"lpips", "fid", "st-lpips", "fd-alex"}


def test_table_and_json(result, tmp_path):
    lines = result.table().splitlines()
    assert len(lines[1]) >= len(lines[0]) and "model-error ↓ N=8" in lines[0]
    assert max(len(line) for line in lines if "not run" not in line) <= 120
    assert sum(line.startswith("big ") for line in lines) == 2
    assert sum(line.startswith("big ") for line in result.table(width=400).splitlines()) == 1
    data = json.loads(result.save(tmp_path / "sub" / "r.json").read_text(), parse_constant=pytest.fail)
    assert data["ranking"][0] == "same" and data["candidates"][0]["scores"]["psnr"]["n"] == 5
    assert "images" not in data and data["settings"]["num_inference_steps"] == 3
    for path, match in {
        tmp_path / "r.pdf": "html or",
        tmp_path / "r": "html or",
        None: "a path is a text, got None",
        5: "a path is a text, got 5",
        "": "is empty",
        "/proc/x.html": "cannot write /proc/x.html",
        tmp_path / "sub" / "r.json" / "r.html": "cannot write",
    }.items():
        with pytest.raises(DQError, match=match):
            result.save(path)
    assert result.save(str(tmp_path / "R.HTML")).read_text().startswith("<!")


def test_batch_size_does_not_matter(flux, altered, prompts, call):
    runs = [
        evaluate(altered(0.1), flux, prompts, FAST, kwargs=call, batch_size=size, records=6, progress=False)
        for size in (1, 3, 5)
    ]
    for other in runs[1:]:
        ours, theirs = runs[0]["candidate"], other["candidate"]
        assert (runs[0].images["reference"].int() - other.images["reference"].int()).abs().max() <= 1
        assert [(r["prompt"], r["step"]) for r in ours.model_errors] == [
            (r["prompt"], r["step"]) for r in theirs.model_errors
        ]
        for name in ("model-error", "latent-error"):
            assert ours.scores[name].value == pytest.approx(theirs.scores[name].value, rel=1e-3)


def test_seed_changes_images_and_prompts_differ(flux, prompts, call):
    one = generate(flux, "x", Settings(tuple(prompts), call, seed=0, progress=False)).images
    two = generate(flux, "x", Settings(tuple(prompts), call, seed=1, progress=False)).images
    assert not torch.equal(one, two) and not torch.equal(one[0], one[1])


def test_cfg_with_two_calls_and_one_negative_prompt(flux, altered, prompts, call):
    call |= {"negative_prompt": "dog", "true_cfg_scale": 2.0}
    found = evaluate(altered(), flux, prompts, FAST, kwargs=call, batch_size=5, records=7, progress=False)
    score = found["candidate"].scores["model-error"]
    assert (score.value, score.n) == (0.0, 7)


def test_text_as_long_as_the_batch_is_not_cut(flux, prompts, call):
    """txt_ids are [sequence, 3]: with sequence = batch they look like a batch and must not be cut."""
    call["max_sequence_length"] = 5
    with Recorder(flux, 5, 3, 4) as recorder:
        generate(flux, "x", Settings(tuple(prompts), call, batch_size=5, progress=False), (recorder,))
    assert len(recorder.calls) == 4 and all(c.exact for c in recorder.calls)
    assert recorder.calls[0].kwargs["hidden_states"].shape[0] == 1
    assert recorder.calls[0].kwargs["txt_ids"].shape == (5, 3)
    assert not flux.transformer._forward_hooks and not flux.transformer._forward_pre_hooks


def test_prompt_embeddings_are_split_with_the_prompts(flux, altered, prompts, call):
    with torch.no_grad():
        embeds, pooled, _ = flux.encode_prompt(prompts, prompts, max_sequence_length=8)
    given = call | {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
    one = evaluate(altered(), flux, prompts, FAST, kwargs=given, batch_size=2, records=2, progress=False)
    two = evaluate(altered(), flux, prompts, FAST, kwargs=call, batch_size=2, records=2, progress=False)
    assert (one.images["reference"].int() - two.images["reference"].int()).abs().max() <= 1
    assert one.settings["prompt_embeds"] == "tensor[5, 8, 32]"


def test_nan_names_candidate_prompt_and_step(flux, altered, prompts, call):
    broken = altered()
    with torch.no_grad():
        broken.transformer.proj_out.bias[0] = float("nan")
    with pytest.raises(DQError, match=r"mine: the image of prompt 0 \('a red cat'\) holds NaN.*from step 1"):
        evaluate({"mine": broken}, flux, prompts, FAST, kwargs=call, progress=False)


def test_user_errors_are_one_clear_line(flux, altered, prompts, call):
    def run(candidates=None, prompts=prompts, metrics=FAST, **more):
        return evaluate(altered() if candidates is None else candidates, flux, prompts, metrics, progress=False, **more)

    for match, arguments in {
        "at least one prompt": {"prompts": []},
        "must be texts; number 0 of the list is 1": {"prompts": [1]},
        "number 1 of the list is None": {"prompts": ["a", None]},
        "must be a list of texts, got None": {"prompts": None},
        "must be a list of texts, got 5": {"prompts": 5},
        "a list of names .*got 5": {"metrics": 5},
        "a name .*or a Metric, got 5": {"metrics": [5]},
        "kwargs must be a dict": {"kwargs": "x"},
        "batch_size must be a whole number, got 'x'": {"batch_size": "x"},
        "seed must be a whole number, got None": {"seed": None},
        "seed must be at least 0 and at most": {"seed": 10**23},
        "steps .*at least 1, got 0": {"steps": 0},
        "steps .*whole number, got 1.5": {"kwargs": {"num_inference_steps": 1.5}},
        "guidance_scale must be a finite number": {"kwargs": {"guidance_scale": float("nan")}},
        "resamples must be at least 1": {"resamples": 0},
        "records must be at least 1": {"records": 0},
        "device 'foo' cannot be used here": {"device": "foo"},
        "got no candidates": {"candidates": {}},
        "reports must be a dict": {"reports": 5},
        "reports names 'candidat', .*'candidate'": {"reports": {"candidat": None}},
        "is the model FluxTransformer2DModel, not a pipeline": {"candidates": flux.transformer, "kwargs": call},
        "unknown metric 'psnt'.*psnr": {"metrics": ["psnt"]},
        "takes no argument hight": {"kwargs": {"hight": 3}},
        "batch_size must be at least 1": {"batch_size": 0},
        "shares its denoiser": {"candidates": flux, "kwargs": call},
        "cannot be named": {"candidates": {"reference": flux}, "kwargs": call},
        "not a pipeline": {"candidates": {"x": 3}, "kwargs": call},
    }.items():
        with pytest.raises(DQError, match=match):
            run(**arguments)


def test_cached_reference_images(flux, altered, prompts, call, tmp_path):
    images = generate(flux, "x", Settings(tuple(prompts), call, progress=False)).images
    folder = save_images(images, prompts, tmp_path / "cache")
    assert torch.equal(load_images(folder, prompts), images)
    for reference in (folder, dict(zip(prompts, images, strict=True))):
        found = evaluate(altered(), reference, prompts, FAST, kwargs=call, progress=False)
        assert found["candidate"].scores["psnr"].value == 100.0
        assert "cached images" in found.unavailable["model-error"]
        assert "cached images" in found.unavailable["latent-error"]
        assert "cached" in found.table() and found.ranking() == ["candidate"]
    with pytest.raises(DQError, match="no cached reference image for 1 prompts"):
        load_images(folder, [*prompts, "unseen"])
    with pytest.raises(DQError, match=r"index\.json is missing"):
        load_images(tmp_path, prompts)
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(DQError, match="is a pipeline"):
        load_images(tmp_path, prompts)


class VideoPipeline:
    """Frames [N, F, 3, H, W] in an output that is no sequence of images, like Wan's."""

    def __init__(self, shade=0.5):
        self.shade, self.components = shade, {"transformer": nn.Linear(2, 2)}

    def __call__(self, prompt, num_frames=81, generator=None, output_type="np"):
        assert num_frames == 1, "a video was made before it was refused"
        return SimpleNamespace(frames=torch.full((len(prompt), num_frames, 3, 16, 16), self.shade))


def test_videos_are_refused_before_they_are_made_and_single_frames_compared():
    with pytest.raises(
        DQError, match=r"VideoPipeline makes videos, and this takes images: --num-frames 1, in Python num_frames=1"
    ):
        evaluate(VideoPipeline(), VideoPipeline(), ["a"], FAST, progress=False)
    call = {"num_frames": 1}
    found = evaluate(VideoPipeline(0.6), VideoPipeline(), ["a"], FAST, kwargs=call, progress=False)
    levels = round(0.6 * 255) - round(0.5 * 255)
    expected = 10 * torch.log10(torch.tensor(255.0**2 / levels**2)).item()
    assert found["candidate"].scores["psnr"].value == pytest.approx(expected, abs=1e-3)


class Unet(nn.Module):
    """A denoiser that is called with [uncond, cond] as one doubled batch and a tensor without batch dimension."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, sample, timestep, table):
        assert table.shape == (4,)
        return SimpleNamespace(sample=self.scale * sample + table.sum() * 0.01)


class DoubledPipeline:
    """No callback, no output_type; numpy images; CFG as a doubled batch."""

    def __init__(self, scale=1.0):
        self.unet = Unet(scale)

    def __call__(self, prompt, generator, num_inference_steps=2):
        x = torch.stack([torch.randn(3, 24, 24, generator=g) for g in generator])
        for t in range(num_inference_steps):
            both = self.unet(torch.cat([x, 2 * x]), t, torch.arange(4.0)).sample
            x = x - 0.1 * both.chunk(2)[1]
        return SimpleNamespace(images=x.sigmoid().movedim(1, -1).numpy())


def test_a_pipeline_without_callback(prompts):
    """The table has as many entries as the doubled batch: cutting it fails, and the whole batch is kept."""
    result = evaluate(DoubledPipeline(1.1), DoubledPipeline(), prompts[:2], FAST, steps=2, progress=False)
    candidate = result["candidate"]
    assert "callback_on_step_end" in candidate.scores["latent-error"].reason
    assert candidate.scores["model-error"].value == pytest.approx(0.01, rel=0.05)
    assert candidate.scores["psnr"].n == 2


def test_replay_refuses_other_models(flux, altered, prompts, call):
    with Recorder(flux, 5, 3, 2) as recorder:
        generate(flux, "x", Settings(tuple(prompts), call, progress=False), (recorder,))
    with pytest.raises(DQError, match="has no component 'transformer'"):
        replay(SimpleNamespace(), recorder.calls, "mine")
    broken = altered()
    with torch.no_grad():
        broken.transformer.proj_out.bias[0] = float("inf")
    with pytest.raises(DQError, match=r"mine: transformer gives NaN or Inf .*step \d of prompt \d"):
        replay(broken, recorder.calls, "mine")


def test_other_noise_is_noticed(flux, altered, prompts, call):
    """A candidate with another scheduler does not pass as a quantization error."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    other = altered()
    other.scheduler = FlowMatchEulerDiscreteScheduler(shift=30.0)
    call["num_inference_steps"] = 4
    found = evaluate(other, flux, prompts[:2], FAST, kwargs=call, records=2, progress=False)["candidate"]
    assert found.scores["model-error"].value == 0.0
    assert found.latent_curve[0] > 0


def test_one_prompt_has_no_interval(flux, altered, call):
    found = evaluate(altered(0.1), flux, "a red cat", ["psnr", "fd-alex"], kwargs=call, records=2, progress=False)
    score = found["candidate"].scores["psnr"]
    assert score.n == 1 and score.low is None
    assert found["candidate"].scores["fd-alex"].reason
