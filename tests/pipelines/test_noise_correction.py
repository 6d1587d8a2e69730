"""Noise correction: golden factors, gains on new prompts, and refusal of every run that it was not fitted for."""

import copy
import json

import pytest
import torch

import dq
from dq.pipelines import noise_correction as noise
from dq.pipelines.noise_correction import NoiseCorrection, factor
from dq.records import outputs, relative_error
from dq.registry import DQError
from dq.replay import call

STEPS = 4


def test_golden():
    """methods_diffusion V9."""
    e = torch.tensor([1.0, -0.5, 0.25, 2.0, -1.5], dtype=torch.float64)
    q = torch.tensor([1.1, -0.62, 0.2, 2.3, -1.72], dtype=torch.float64)
    sums = (e @ e)[None], (e @ q)[None], (q @ q)[None]
    ptqd, least = (float(factor(*sums, kind)) for kind in ("ptqd", "least_squares"))
    assert 1 / ptqd - 1 == pytest.approx(0.142479, abs=1e-6)
    assert float((q * ptqd - e).norm()) == pytest.approx(0.0949942, abs=1e-6)
    assert least == pytest.approx(0.874246, abs=1e-6)
    assert float((q * least - e).norm()) == pytest.approx(0.0949375, abs=1e-6)
    assert factor(*[torch.zeros(1)] * 3, "ptqd") == 1.0


@pytest.fixture(scope="module")
def setting(tiny):
    """(16-bit pipeline, quantized one, records of training prompts, records of another prompt)."""
    pipe = tiny.flux_pipeline()
    quantized = copy.deepcopy(pipe)
    dq.quantize(quantized, tiny.recipe("w4a4-int4"), progress=False)
    kwargs = {k: v for k, v in tiny.LATENTS.items() if k != "num_inference_steps"}
    found = [
        dq.Prompts(p, steps=STEPS, records=64, bins=STEPS, seed=s, **kwargs).collect(pipe, ["transformer"])
        for p, s in ((tiny.PROMPTS[:3], 0), (tiny.PROMPTS[4:], 70))
    ]
    return pipe, quantized, found[0]["transformer"][0], found[1]["transformer"][0]


def _error(model, reference, records):
    device = torch.device("cpu")
    pairs = [[outputs(call(m, r.args, r.kwargs, device))[0] for m in (model, reference)] for r in records]
    return sum(relative_error(*pair) for pair in pairs) / len(pairs)


@pytest.mark.parametrize("per_channel", [False, True])
def test_lowers_the_error_of_calls_on_new_prompts(setting, per_channel):
    pipe, quantized, records, held = setting
    found = noise.fit(pipe, quantized, records, per_channel=per_channel)
    assert (found.scheduler, found.steps) == ("FlowMatchEulerDiscreteScheduler", STEPS)
    assert {len(f) for f in found.factors} == {16 if per_channel else 1}
    before = _error(quantized.transformer, pipe.transformer, held)
    assert found.after < found.before and f"{STEPS} steps" in str(found)
    noise.attach(quantized, found)
    try:
        assert _error(quantized.transformer, pipe.transformer, held) < before
    finally:
        noise.detach(quantized)
    assert _error(quantized.transformer, pipe.transformer, held) == before


def test_the_output_is_multiplied_and_nothing_else(setting):
    pipe, quantized, records, _ = setting
    model, record = quantized.transformer, records[0]
    found = noise.fit(pipe, quantized.transformer, records, kind="ptqd")
    plain = model(**record.kwargs | {"return_dict": True}).sample
    noise.attach(quantized, found)
    try:
        expected = plain * found.at(record.timestep)[0]
        torch.testing.assert_close(model(**record.kwargs | {"return_dict": True}).sample, expected)
        torch.testing.assert_close(model(**record.kwargs | {"return_dict": False})[0], expected)
        with pytest.raises(DQError, match="attached to the transformer already"):
            noise.attach(quantized, found)
    finally:
        noise.detach(quantized)
    noise.detach(quantized)  # a second time does nothing


def test_refuses_other_runs(setting, tiny):
    """Another number of steps, other sigmas, another scheduler or its settings; the message names both."""
    from diffusers import EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler

    pipe, quantized, records, _ = setting
    found = noise.attach(quantized, noise.fit(pipe, quantized, records))
    try:
        tiny.denoise(quantized, num_inference_steps=STEPS)
        with pytest.raises(DQError, match=f"with {STEPS} steps, and this run has {STEPS + 1};"):
            tiny.denoise(quantized, num_inference_steps=STEPS + 1)
        with pytest.raises(DQError, match=r"no timestep 0.6 .*nearest of its 4 is"):
            tiny.denoise(quantized, num_inference_steps=STEPS, sigmas=[1.0, 0.6, 0.4, 0.2])
        original = quantized.scheduler
        quantized.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        with pytest.raises(DQError, match=r"with shift=1.0, and here it is 3.0"):
            tiny.denoise(quantized, num_inference_steps=STEPS)
        quantized.scheduler = EulerDiscreteScheduler()
        with pytest.raises(DQError, match=r"belongs to FlowMatchEulerDiscreteScheduler, .* EulerDiscreteScheduler"):
            found.check(quantized.scheduler)
        quantized.scheduler = original
        tiny.denoise(quantized, num_inference_steps=STEPS)
    finally:
        noise.detach(quantized)


def test_travels_as_json_and_with_the_model(setting, tiny, tmp_path):
    from diffusers import FluxTransformer2DModel

    pipe, quantized, records, _ = setting
    found = noise.fit(pipe, quantized, records)
    found.save(tmp_path / "noise.json")
    assert NoiseCorrection.load(tmp_path / "noise.json") == found
    noise.attach(quantized, found)
    try:
        expected = tiny.denoise(quantized)
        quantized.transformer.save_pretrained(tmp_path / "model")
    finally:
        noise.detach(quantized)
    other = copy.copy(quantized)
    other.transformer = FluxTransformer2DModel.from_pretrained(tmp_path / "model")
    assert not torch.equal(tiny.denoise(other), expected)
    assert noise.attach(other) == found  # carried, and only used when asked for
    assert torch.equal(tiny.denoise(other), expected)
    copied = copy.deepcopy(other.transformer)
    assert len(copied._forward_hooks) == 1
    with pytest.raises(DQError, match="carries no noise correction"):
        noise.attach(quantized)


def test_complaints(setting, tmp_path):
    pipe, quantized, records, _ = setting
    with pytest.raises(DQError, match="did you mean 'ptqd'"):
        noise.fit(pipe, quantized, records, kind="ptqq")
    with pytest.raises(DQError, match="needs calibration"):
        noise.fit(pipe, quantized, [])
    with pytest.raises(DQError, match=r"lack 1 of 4 steps, e.g. step 2"):
        noise.fit(pipe, quantized, [r for r in records if r.step != 2])
    shorter = copy.copy(records[0])
    shorter.steps = 3
    with pytest.raises(DQError, match="runs of 3 and of 4 steps"):
        noise.fit(pipe, quantized, [shorter, *records])
    shifted = copy.copy(records[0])
    shifted.timestep += 0.1
    with pytest.raises(DQError, match="records of one size"):
        noise.fit(pipe, quantized, [*records, shifted])
    with pytest.raises(DQError, match="a pipeline with denoiser and scheduler"):
        noise.fit(pipe.transformer, quantized, records)
    data = noise.fit(pipe, quantized, records).to_dict()
    (tmp_path / "bad.json").write_text(json.dumps(data | {"factors": [[1.0]]}))
    with pytest.raises(DQError, match="each of its 4 steps"):
        NoiseCorrection.load(tmp_path / "bad.json")
    with pytest.raises(DQError, match="cannot read the noise correction"):
        NoiseCorrection.load(tmp_path / "missing.json")
    with pytest.raises(DQError, match="unknown word 'stps'"):
        NoiseCorrection.from_dict(data | {"stps": 4})
    with pytest.raises(DQError, match="incomplete"):
        NoiseCorrection.from_dict({"steps": 4})


def test_prompts_are_run_here(setting, tiny):
    pipe, quantized, _, _ = setting
    kwargs = {k: v for k, v in tiny.LATENTS.items() if k != "num_inference_steps"}
    found = noise.fit(pipe, quantized, dq.Prompts(tiny.PROMPTS[:1], steps=STEPS, records=8, **kwargs))
    assert len(found.factors) == STEPS == len(set(found.timesteps))
