"""How pipelines run classifier-free guidance, and what calibration makes of it: branches, steps, halves, weights.

Every pipeline of the table runs its own denoising loop on a tiny model. A record is judged by the text that it holds.
"""

import pytest
import torch
from tiny_pipelines import PIPELINES, build, embedding
from tqdm import tqdm

import dq
from dq.linear import quantized_linears
from dq.pipelines.calibration import Prompts
from dq.pipelines.recorder import guidance_of
from dq.records import tensors

PROMPTS = ["a cat", "two small red dogs"]
NEGATIVE = "ugly and blurred and bad"
STEPS = 4
VIDEO = dict(num_frames=5)
# What each pipeline is called with, how guidance is turned on and off ({}: by leaving it out), and the layout:
# one call with the unconditional or the conditional half first, two calls, or none (a distilled model).
LAYOUTS = {
    "sd1.5": (dict(height=16, width=16), dict(guidance_scale=5.0), dict(guidance_scale=1.0), "uncond first"),
    "sdxl": (dict(height=16, width=16), dict(guidance_scale=5.0), dict(guidance_scale=1.0), "uncond first"),
    "sd3": (dict(height=16, width=16), dict(guidance_scale=5.0), dict(guidance_scale=1.0), "uncond first"),
    "pixart": (dict(height=16, width=16, use_resolution_binning=False), dict(guidance_scale=5.0),
               dict(guidance_scale=1.0), "uncond first"),
    "sana": (dict(height=256, width=256, use_resolution_binning=False), dict(guidance_scale=5.0),
             dict(guidance_scale=1.0), "uncond first"),
    "ltx": (dict(height=128, width=128, num_frames=9), dict(guidance_scale=5.0), dict(guidance_scale=1.0),
            "uncond first"),
    "cogvideox": (dict(height=64, width=64, num_frames=9), dict(guidance_scale=5.0), dict(guidance_scale=1.0),
                  "uncond first"),
    "z-image": (dict(height=32, width=32), dict(guidance_scale=3.0), dict(guidance_scale=0.0), "cond first"),
    "dit": ({}, dict(guidance_scale=4.0), dict(guidance_scale=1.0), "cond first"),
    "wan2.1": (dict(height=64, width=64) | VIDEO, dict(guidance_scale=5.0), dict(guidance_scale=1.0), "two calls"),
    "wan2.2": (dict(height=64, width=64) | VIDEO, dict(guidance_scale=5.0), dict(guidance_scale=1.0), "two calls"),
    "qwen-image": (dict(height=64, width=64), dict(true_cfg_scale=4.0), dict(true_cfg_scale=1.0), "two calls"),
    "lumina2": (dict(height=32, width=32), dict(guidance_scale=4.0), dict(guidance_scale=1.0), "two calls"),
    "chroma": (dict(height=64, width=64), dict(guidance_scale=4.0), dict(guidance_scale=1.0), "two calls"),
    "hunyuan-video": (dict(height=32, width=32) | VIDEO, dict(true_cfg_scale=4.0), {}, "two calls"),
    "hunyuan-video-1.5": (dict(height=64, width=64) | VIDEO, {}, None, "two calls"),
    "modular sd3": (dict(height=16, width=16), {}, None, "two calls"),
    "flux.2": (dict(height=64, width=64), None, dict(guidance_scale=4.0), "distilled"),
}  # fmt: skip


def collect(pipe, prompts=PROMPTS, steps=STEPS, **kwargs):
    names = [n for n in ("unet", "transformer", "transformer_2") if getattr(pipe, n, None) is not None]
    run = Prompts(prompts, steps=steps, records=256, bins=2, **kwargs)
    return run.collect(pipe, names, lambda *a, **k: tqdm(*a, **k | {"disable": True}))


def words(name):
    return ["3", "7"] if name == "dit" else PROMPTS


def guided(name):
    """Keyword arguments of a guided run, with a negative prompt where the pipeline takes one."""
    call, on, _, _ = LAYOUTS[name]
    return call | on | ({} if name in ("dit", "flux.2") else {"negative_prompt": NEGATIVE})


def holds(record, text, sample=0):
    """Whether a sample of the call is conditioned on the text."""
    if text.isdigit():
        return int(record.kwargs["class_labels"][sample]) == int(text)
    for t in tensors((record.args, record.kwargs)):
        known = embedding(text, len(t[sample]) if t.dim() == 3 and len(t) > sample else 0)
        if t.dim() == 3 and len(t) > sample and t[sample].shape == known.shape and torch.equal(t[sample], known):
            return True
        if t.dim() == 2 and t.shape == embedding(text).shape and torch.equal(t, embedding(text)):
            return True  # Z-Image: one tensor per sample, without a batch
    return False


ON = [n for n, layout in LAYOUTS.items() if layout[1] is not None]
OFF = [n for n, layout in LAYOUTS.items() if layout[2] is not None]


@pytest.mark.parametrize("name", ON)
def test_branches_are_told_apart_by_their_text(name):
    negative = "1000" if name == "dit" else NEGATIVE
    for component, (records, described) in collect(build(name), words(name), **guided(name)).items():
        branches = {s.partition("/")[2] for s in described["seen"]}
        assert branches == {"cond", "uncond"} and {r.branch for r in records} == branches, component
        for record in records:
            own, other = words(name)[record.prompt], words(name)[1 - record.prompt]
            expected = own if record.branch == "cond" else negative
            assert holds(record, expected) and not holds(record, other)
            assert not holds(record, negative if record.branch == "cond" else own)


@pytest.mark.parametrize("name", ON)
def test_both_branches_of_every_step(name):
    """And they see the same latents: halves of a doubled batch were cut where they meet."""
    for component, (records, described) in collect(build(name), words(name), **guided(name)).items():
        steps = {"sd1.5": STEPS + 1, "wan2.2": STEPS // 2}.get(name, STEPS)  # PNDM calls one step twice
        assert sorted((r.prompt, r.step, r.branch) for r in records) == sorted(
            (p, s, b) for p in (0, 1) for s in range(steps) for b in ("cond", "uncond")
        ), component
        at = {(r.prompt, r.step, r.branch): r for r in records}
        for prompt in (0, 1):
            for step in range(steps):
                cond, uncond = (first_latents(at[prompt, step, b]) for b in ("cond", "uncond"))
                assert torch.equal(cond, uncond)
        assert set(described["seen"]) == {f"{b}/{x}" for b in (0, 1) for x in ("cond", "uncond")}


def first_latents(record):
    kwargs = record.kwargs
    found = next((kwargs[n] for n in ("hidden_states", "sample", "x") if n in kwargs), None)
    found = record.args[0] if found is None else found
    return found[0] if isinstance(found, list) else found


@pytest.mark.parametrize("name", OFF)
def test_without_guidance_every_call_is_single(name):
    call, _, off, _ = LAYOUTS[name]
    for records, described in collect(build(name), words(name), **call | off).values():
        assert {s.partition("/")[2] for s in described["seen"]} == {"single"}
        assert all(r.branch == "single" and r.weight == 1.0 for r in records)
        assert all(holds(r, words(name)[r.prompt]) for r in records)


@pytest.mark.parametrize("name", ON)
def test_batches(name):
    """Two prompts in one call are one record per branch and step, with both prompts in it."""
    for records, _ in collect(build(name), words(name), batch_size=2, **guided(name)).values():
        for record in records:
            latents = first_latents(record)
            assert len(latents) == 2 or (record.args and len(record.args[0]) == 2)
            if record.branch == "cond" and name != "z-image":
                padded = max(len(w.split()) + 1 for w in words(name))
                length = PIPELINES.get(name, [7] * 5)[4] or padded
                assert name == "dit" or all(batch_holds(record, w, i, length) for i, w in enumerate(words(name)))


def batch_holds(record, text, sample, length):
    known = embedding(text, length)
    same = (t[sample] for t in tensors((record.args, record.kwargs)) if t.dim() == 3 and len(t) == 2)
    return any(t.shape == known.shape and torch.equal(t, known) for t in same)


def test_two_denoisers_are_calibrated_on_their_own_steps():
    """Wan 2.2: each has bins and a step count of its own, and only timesteps on its side of the boundary."""
    found = collect(build("wan2.2"), steps=10, **guided("wan2.2"))
    early, late = (found[c][0] for c in ("transformer", "transformer_2"))
    assert min(r.timestep for r in early) >= 600 > max(r.timestep for r in late)
    for records, described in found.values():
        steps = {r.steps for r in records}
        assert len(steps) == 1 and {r.step for r in records} == set(range(*steps))
        counts = [described["seen"][f"{b}/cond"] for b in (0, 1)]
        assert min(counts) >= 2 and max(counts) - min(counts) <= 2
    assert len({r.step for r in early}) + len({r.step for r in late}) == 10


def test_a_denoiser_without_steps_is_named():
    pipe = build("wan2.2")
    with pytest.raises(dq.DQError, match="WanPipeline never called transformer_2 during calibration: take more steps"):
        collect(pipe, steps=1, **guided("wan2.2"))
    assert "encode_prompt" in vars(pipe)  # the stub is back in its place


@pytest.mark.parametrize("name", ["sd3", "z-image", "qwen-image", "wan2.1"])
def test_the_same_text_on_both_sides_falls_back_on_names_and_order(name):
    """With nothing to tell the halves apart by, cond and uncond still come in equal numbers."""
    found = collect(build(name), ["same"], **guided(name) | dict(negative_prompt="same"))
    seen = next(iter(found.values()))[1]["seen"]
    assert seen == {f"{b}/{x}": 2 for b in (0, 1) for x in ("cond", "uncond")}


@pytest.mark.parametrize(("name", "expected"), [("sd3", (12.25, 6.25)), ("z-image", (20.25, 12.25))])
def test_weights_of_the_branches(name, expected):
    """g^2 : (g - 1)^2, section 1.3 of the methods; Z-Image guides by c + g (c - u): its scale is one more."""
    call = guided(name) | dict(guidance_scale=3.5)
    records = next(iter(collect(build(name), **call).values()))[0]
    weight = {r.branch: r.weight for r in records}
    assert weight["cond"] / weight["uncond"] == pytest.approx(expected[0] / expected[1])


def test_scales_of_second_denoisers_and_guiders():
    assert guidance_of(dict(guidance_scale=4.0, guidance_scale_2=3.0), build("wan2.2"), "transformer_2") == 3.0
    assert guidance_of(dict(guidance_scale=4.0, guidance_scale_2=3.0), build("wan2.2"), "transformer") == 4.0
    assert guidance_of({}, build("hunyuan-video-1.5")) == 5.0 and guidance_of({}, build("modular sd3")) == 7.0
    assert guidance_of(dict(guidance_scale=6.0), build("hunyuan-video")) == 1.0  # an input of the distilled model


@pytest.mark.parametrize("name", ["hunyuan-video-1.5", "modular sd3"])
def test_a_guider_that_is_off(name):
    pipe = build(name)
    pipe.guider.disable()
    seen = collect(pipe, **guided(name))["transformer"][1]["seen"]
    assert seen == {"0/single": 4, "1/single": 4}


def test_truncated_guidance():
    """Lumina 2 leaves guidance out from a share of the steps on: those calls are single."""
    found = collect(build("lumina2"), cfg_trunc_ratio=0.5, **guided("lumina2"))
    assert found["transformer"][1]["seen"] == {"0/cond": 4, "0/uncond": 4, "1/single": 4}


@pytest.mark.parametrize(("name", "size"), [
    ("sd3", dict(height=8, width=24)), ("z-image", dict(height=32, width=48)), ("wan2.1", dict(height=80, width=112)),
    ("qwen-image", dict(height=80, width=112)), ("sdxl", dict(height=24, width=40)),
    ("flux.2", dict(height=80, width=112)), ("chroma", dict(height=80, width=112)),
])  # fmt: skip
def test_unusual_sizes_and_few_steps(name, size):
    """No multiple of the usual sizes, and a run of two steps as distilled models take."""
    call, on, off, _ = LAYOUTS[name]
    pipe = build(name)
    found = collect(pipe, steps=2, **call | (on or off) | size)
    assert all(len({r.step for r in records}) == 2 for records, _ in found.values())


@pytest.mark.parametrize("name", ["sd3", "z-image", "wan2.2", "lumina2", "sdxl", "dit"])
def test_a_recipe_is_calibrated_on_them(name, tiny):
    """The whole way: records of both branches through the loop over blocks, and a run afterwards."""
    pipe = build(name)
    run = Prompts(words(name), steps=4, records=8, **guided(name))
    report = dq.quantize(pipe, tiny.recipe("int8-smooth"), calibration=run, progress=False)
    assert all(x.sqnr_db > 20 for x in report.layers)
    model = getattr(pipe, "unet", None) or pipe.transformer
    assert quantized_linears(model)
    assert not any("do not receive the same input" in r for r in report.plan.remarks)
    collect(pipe, words(name), steps=1 if name != "wan2.2" else 4, **guided(name))
