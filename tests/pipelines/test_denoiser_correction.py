"""`dq.correct` of a denoiser: the distance of predictions on calls that a pipeline makes."""

import copy

import pytest

import dq
from dq.linear import quantized_linears


@pytest.fixture(scope="module")
def setting(tiny):
    """(16-bit pipeline, how prompts of it are calibrated)."""
    kwargs = {k: v for k, v in tiny.LATENTS.items() if k != "num_inference_steps"}
    return tiny.flux_pipeline(), dq.Prompts(tiny.PROMPTS[:3], steps=4, records=16, **kwargs)


def test_a_pipelines_denoiser_learns(setting, tiny, tmp_path):
    pipe, prompts = setting
    quantized = copy.deepcopy(pipe)
    dq.quantize(quantized, tiny.recipe("w4a4-int4"), progress=False)
    names = list(quantized_linears(quantized.transformer))
    report = dq.correct(quantized, pipe, prompts, rank=4, steps=15, rate=5e-3, batch=2, progress=False)
    assert report.changed and report.after < 0.9 * report.before and "relative error on held-out records" in str(report)
    assert list(quantized_linears(quantized.transformer)) == names and not quantized_linears(pipe.transformer)
    assert quantized.transformer.dq_artifact["correction"]["rank"] == 4
    quantized.save_pretrained(tmp_path)
    again = type(pipe).from_pretrained(tmp_path)
    assert quantized_linears(again.transformer)[names[0]].config.rank == 4


def test_what_is_refused(setting, tiny):
    pipe, prompts = setting
    quantized = copy.deepcopy(pipe)
    with pytest.raises(dq.DQError, match=r"nothing in \w+ is quantized: dq\.quantize it first"):
        dq.correct(quantized, pipe, prompts)
    dq.quantize(quantized, tiny.recipe("w4a4-int4"), progress=False)
    with pytest.raises(dq.DQError, match="one of model and reference is a pipeline"):
        dq.correct(quantized, pipe.transformer, prompts)
    with pytest.raises(dq.DQError, match="the reference of a correction is the 16-bit model"):
        dq.correct(quantized, quantized, prompts)
