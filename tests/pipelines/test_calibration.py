"""`dq.Prompts`: what is recorded of a pipeline run, how it is stratified, and what is refused."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import dq
from dq.linear import quantized_linears
from dq.pipelines.calibration import Prompts

KWARGS = dict(height=32, width=32, max_sequence_length=16)


@pytest.fixture(scope="module")
def pipe(tiny):
    return tiny.flux_pipeline()


def collect(pipe, prompts, component="transformer"):
    records, described = prompts.collect(pipe, [component], quiet)[component]
    return records, described


def quiet(*args, **kwargs):
    from tqdm import tqdm

    return tqdm(*args, **kwargs | {"disable": True})


def test_without_guidance_every_call_is_single(tiny, pipe):
    records, described = collect(pipe, Prompts(tiny.PROMPTS[:3], steps=8, bins=4, records=24, **KWARGS))
    assert described["seen"] == {f"{b}/single": 6 for b in range(4)}
    assert described["kept"] == {f"{b}/single": 6 for b in range(4)}
    assert {(r.step, r.steps, r.branch, r.denoiser) for r in records} == {
        (i, 8, "single", "transformer") for i in range(8)
    }
    assert {r.prompt for r in records} == {0, 1, 2}
    by_step = sorted((r for r in records if r.prompt == 1), key=lambda r: r.step)
    times = [r.timestep for r in by_step]
    assert times == sorted(times, reverse=True) and min(times) > 0 and max(times) <= 1
    shape = by_step[0].kwargs["hidden_states"].shape
    assert shape == (1, 64, 16) and all(
        t.device.type == "cpu" for t in by_step[0].kwargs.values() if hasattr(t, "device")
    )


@pytest.mark.parametrize("negative", ["ugly", "a much longer negative prompt, with many words in it"])
def test_with_guidance_every_call_is_cond_or_uncond(tiny, pipe, negative):
    prompts = Prompts(
        tiny.PROMPTS[:2], steps=4, bins=2, records=16, true_cfg_scale=2.0, negative_prompt=negative, **KWARGS
    )
    records, described = collect(pipe, prompts)
    assert described["seen"] == {f"{b}/{branch}": 4 for b in range(2) for branch in ("cond", "uncond")}
    assert sorted((r.prompt, r.step, r.branch) for r in records) == sorted(
        (p, s, branch) for p in range(2) for s in range(4) for branch in ("cond", "uncond")
    )
    at = {(r.prompt, r.step, r.branch): r for r in records}
    for prompt in range(2):
        for step in range(4):
            cond, uncond = at[prompt, step, "cond"].kwargs, at[prompt, step, "uncond"].kwargs
            assert torch.equal(cond["hidden_states"], uncond["hidden_states"])
            assert not torch.equal(cond["encoder_hidden_states"], uncond["encoder_hidden_states"])
    # the negative prompt is the same for all prompts, so its embedding is too
    assert torch.equal(*(at[p, 0, "uncond"].kwargs["encoder_hidden_states"] for p in range(2)))


def test_guidance_of_one_skips_the_second_branch(tiny, pipe):
    prompts = Prompts(tiny.PROMPTS[:1], steps=2, true_cfg_scale=1.0, negative_prompt="ugly", **KWARGS)
    assert set(collect(pipe, prompts)[1]["seen"]) == {"0/single", "2/single"}


def test_batches_and_their_generators(tiny, pipe):
    """Prompt i has its own seed: batching changes no latent."""
    one = collect(pipe, Prompts(tiny.PROMPTS[:4], steps=2, **KWARGS))[0]
    two = collect(pipe, Prompts(tiny.PROMPTS[:4], steps=2, batch_size=3, **KWARGS))[0]
    assert [len(r.kwargs["hidden_states"]) for r in two] == [3, 3, 1, 1]
    first = {r.prompt: r.kwargs["hidden_states"] for r in one if r.step == 0}
    batched = torch.cat([r.kwargs["hidden_states"] for r in two if r.step == 0])
    assert torch.equal(torch.cat([first[i] for i in range(4)]), batched)


def test_the_same_settings_give_the_same_records(tiny, pipe):
    def run(**kwargs):
        return collect(pipe, Prompts(tiny.PROMPTS[:3], steps=4, records=5, **KWARGS | kwargs))[0]

    a, b, c = run(), run(), run(seed=1)
    assert [(r.prompt, r.step) for r in a] == [(r.prompt, r.step) for r in b]
    assert all(torch.equal(x.kwargs["hidden_states"], y.kwargs["hidden_states"]) for x, y in zip(a, b, strict=True))
    assert not torch.equal(a[0].kwargs["hidden_states"], c[0].kwargs["hidden_states"])


def test_records_are_bounded_and_even(tiny, pipe):
    records, described = collect(pipe, Prompts(tiny.PROMPTS, steps=8, records=10, bins=4, **KWARGS))
    assert sum(described["seen"].values()) == 40
    assert set(described["kept"].values()) == {2} and len(records) == 8


def test_the_pipeline_is_left_as_it_was(tiny):
    pipe = tiny.flux_pipeline()
    pipe.set_progress_bar_config(desc="mine")
    before = tiny.denoise(pipe)
    collect(pipe, Prompts(tiny.PROMPTS[:2], steps=2, true_cfg_scale=2.0, negative_prompt="ugly", **KWARGS))
    assert pipe._progress_bar_config == {"desc": "mine"}
    assert "cache_context" not in vars(pipe.transformer)
    assert not pipe.transformer._forward_hooks and not pipe.transformer._forward_pre_hooks
    pipe.set_progress_bar_config(disable=True)
    assert torch.equal(tiny.denoise(pipe), before)


@pytest.mark.filterwarnings("ignore:recipe .* needs no calibration")
def test_nan_names_the_component_and_the_step(tiny, monkeypatch):
    pipe, calls = tiny.flux_pipeline(), []

    def poisoned(module, args, output):
        calls.append(1)
        return output * float("nan") if len(calls) == 6 else output

    pipe.transformer.proj_out.register_forward_hook(poisoned)
    with pytest.raises(dq.DQError, match="transformer gave NaN or Inf at step 1 of prompt 1 during calibration"):
        dq.quantize(pipe, tiny.recipe("int8"), calibration=Prompts(tiny.PROMPTS[:3], steps=4, **KWARGS), progress=False)
    assert not quantized_linears(pipe.transformer)


@pytest.mark.filterwarnings("ignore:recipe .* needs no calibration")
def test_unknown_arguments_are_refused(tiny, pipe):
    with pytest.raises(
        dq.DQError, match=r"FluxPipeline takes no argument 'guidence_scale'; did you mean .*'guidance_scale'"
    ):
        collect(pipe, Prompts(["a"], steps=1, guidence_scale=3.0))
    with pytest.raises(dq.DQError, match="at least 1"):
        Prompts(["a"], steps=0)
    with pytest.raises(dq.DQError, match="at least 1"):
        Prompts(["a"], batch_size=0)
    with pytest.raises(dq.DQError, match="at least 1"):
        collect(pipe, Prompts(["a"], steps=1, records=0))
    with pytest.raises(dq.DQError, match=r"dq\.Prompts runs a pipeline"):
        dq.quantize(pipe.transformer, tiny.recipe("int8"), calibration=Prompts(["a"]))


def test_prompts_from_files_and_generators(tiny, tmp_path):
    text, table = tmp_path / "p.txt", tmp_path / "p.tsv"
    text.write_text("a red circle\n\n  two blue squares  \n", encoding="utf-8")
    table.write_text("Prompt\tCategory\na cat\tanimals\na dög\tanimals\n", encoding="utf-8")
    assert Prompts.from_file(text, steps=3).prompts == ["a red circle", "two blue squares"]
    assert Prompts.from_file(str(table)).prompts == ["a cat", "a dög"]
    assert Prompts.from_file(text, steps=3, guidance_scale=2.0).kwargs == {"guidance_scale": 2.0}
    assert Prompts(f"prompt {i}" for i in range(3)).prompts == ["prompt 0", "prompt 1", "prompt 2"]
    assert Prompts("one text").prompts == ["one text"]
    with pytest.raises(dq.DQError, match=r"cannot read prompts from .*missing"):
        Prompts.from_file(tmp_path / "missing.txt")
    text.write_bytes("\ufeffa cat\r\na dog\r\n".encode())
    assert Prompts.from_file(text).prompts == ["a cat", "a dog"]
    for content, match in {
        b"\n \n": r"p\.txt holds no prompts",
        "a cat".encode("utf-16"): "no UTF-8 text",
        b"\xff\xd8\xff\xe0": "no UTF-8 text",
        b"a\0b": "binary",
    }.items():
        text.write_bytes(content)
        with pytest.raises(dq.DQError, match=match):
            Prompts.from_file(text)
    for path in (tmp_path, None, 5):
        with pytest.raises(dq.DQError, match="cannot read prompts"):
            Prompts.from_file(path)


@pytest.mark.parametrize(
    ("prompts", "settings", "match"),
    [
        ([None], {}, "must be texts; number 0 of the list is None"),
        (["a", 3], {}, "number 1 of the list is 3"),
        (5, {}, "must be a list of texts, got 5"),
        ([], {}, "no prompts"),
        (b"a", {}, "must be a list of texts, got bytes"),
        ("a", {"steps": "4"}, "steps must be a whole number, got '4'"),
        ("a", {"steps": 1.5}, "steps must be a whole number, got 1.5"),
        ("a", {"steps": True}, "steps must be a whole number"),
        ("a", {"batch_size": "x"}, "batch_size must be a whole number"),
        ("a", {"records": "x"}, "records must be a whole number"),
        ("a", {"bins": 0}, "bins must be at least 1"),
        ("a", {"seed": None}, "seed must be a whole number, got None"),
        ("a", {"seed": 10**23}, "seed must be at least 0 and at most"),
        ("a", {"guidance_scale": float("nan")}, "guidance_scale must be a finite number, got nan"),
    ],
)
def test_values_are_checked_when_they_are_given(prompts, settings, match):
    with pytest.raises(dq.DQError, match=match):
        Prompts(prompts, **settings)


def test_the_description_tells_every_setting_apart():
    def described(**kwargs):
        return json.dumps(Prompts("a", **kwargs).describe())

    embeds = torch.ones(2, 3, dtype=torch.bfloat16)
    changes = [{}, {"x": [1, 2]}, {"x": [1, 3]}, {"x": embeds}, {"x": embeds * 2}, {"x": {"scale": 1.0}}]
    assert len({described(**c) for c in changes}) == len(changes)


class Denoiser(nn.Module):
    """A model that sees doubled batches."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, sample, timestep, encoder_hidden_states, scale=None):
        return SimpleNamespace(to_tuple=lambda: (self.lin(sample) + encoder_hidden_states,))


class DoublingPipeline:
    """Classifier-free guidance in one call: the batch twice, unconditional half first, as most pipelines do it."""

    def __init__(self):
        self.unet = Denoiser()
        self.components = {"unet": self.unet, "scheduler": None}

    def __call__(self, prompt, generator=None, num_inference_steps=4, guidance_scale=5.0, negative_prompt=None):
        self.do_classifier_free_guidance = guidance_scale > 1
        n, twice = len(prompt), 2 if self.do_classifier_free_guidance else 1
        text = torch.cat([torch.full((n, 1), -1.0)] * (twice - 1) + [torch.ones(n, 1)])
        for i in range(num_inference_steps):
            x = torch.arange(n).float()[:, None].expand(n, 8) + i
            self.unet(torch.cat([x] * twice), torch.tensor(1000 - i), text, scale=torch.tensor([2.0]))


@pytest.mark.parametrize("batch", [1, 2])
def test_doubled_batches_are_split_by_branch(batch):
    records, described = collect(DoublingPipeline(), Prompts(["a", "b"], steps=4, batch_size=batch), "unet")
    assert described["seen"] == {f"{b}/{x}": 2 // batch for b in range(4) for x in ("cond", "uncond")}
    for r in records:
        sample, timestep, text = r.args
        assert len(sample) == len(text) == batch
        assert bool((text == {"cond": 1.0, "uncond": -1.0}[r.branch]).all())
        assert timestep.dim() == 0 and r.timestep == 1000 - r.step
        assert r.kwargs["scale"].shape == (1,)  # what is not doubled is not cut
        assert sample[:, 0].tolist() == [r.step + i for i in range(batch)]


@pytest.mark.parametrize("batch", [1, 2])
def test_no_guidance_means_no_split(batch):
    prompts = Prompts(["a", "b"], steps=4, batch_size=batch, guidance_scale=1.0)
    records, described = collect(DoublingPipeline(), prompts, "unet")
    assert {r.branch for r in records} == {"single"} and set(described["seen"]) == {f"{b}/single" for b in range(4)}
    assert all(len(r.args[0]) == batch for r in records)


def test_text_encoders_are_recorded_by_call(tiny, pipe):
    """A component that is no denoiser has neither steps nor branches."""
    records, described = collect(pipe, Prompts(tiny.PROMPTS[:3], steps=2, **KWARGS), "text_encoder_2")
    assert described["seen"] == {"0/single": 3} and [r.prompt for r in records] == [0, 1, 2]
    pipeline = tiny.flux_pipeline()
    report = dq.quantize(
        pipeline, tiny.recipe("int8-smooth"), components=["transformer", "text_encoder_2"], progress=False,
        calibration=Prompts(tiny.PROMPTS[:3], steps=2, **KWARGS),
    )  # fmt: skip
    assert report.calibration["transformer"]["seen"] == {"0/single": 3, "2/single": 3}
    assert report.calibration["text_encoder_2"]["kept"] == {"0/single": 3}
    assert all(x.sqnr_db > 20 for x in report.layers)


def test_the_artifact_records_what_was_done(tiny, tmp_path):
    pipe = tiny.flux_pipeline(torch.bfloat16)
    prompts = Prompts(tiny.PROMPTS[:3], steps=4, records=8, guidance_scale=3.0, seed=5, **KWARGS)
    dq.quantize(pipe, tiny.recipe("int8-smooth"), calibration=prompts, progress=False)
    pipe.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "transformer" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "dq" and config["format_version"] == 1
    assert config["recipe"]["name"] == "int8-smooth" and config["recipe"]["linear"]["transforms"]
    seen = config["calibration"]
    assert (seen["prompts"], seen["steps"], seen["seed"], seen["batch_size"]) == (3, 4, 5, 1)
    assert len(seen["sha256"]) == 64 and seen["kwargs"]["guidance_scale"] == 3.0
    assert seen["seen"] == {f"{b}/single": 3 for b in range(4)} and seen["kept"] == {f"{b}/single": 2 for b in range(4)}
    assert set(config["versions"]) == {"dq", "torch", "python", "diffusers", "transformers"}
    assert config["versions"]["dq"] == dq.__version__
    other = Prompts([*tiny.PROMPTS[:2], "another"], steps=4).describe()["sha256"]
    assert other != seen["sha256"]
