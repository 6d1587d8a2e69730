"""`--num-frames`: the shell on a video pipeline, tiny Wan with its own VAE and text encoder."""

import json

import pytest
from tiny_models import CASES

import dq

CALL = ("--height", 32, "--width", 32, "--steps", 2, "--max-sequence-length", 16, "--device", "cpu")


@pytest.fixture(scope="module")
def wan(tiny, tmp_path_factory):
    """Its folder."""
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline
    from transformers import UMT5Config, UMT5EncoderModel

    sizes = dict(base_dim=8, z_dim=4, dim_mult=[1] * 4, num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
    folder = tmp_path_factory.mktemp("video") / "wan"
    WanPipeline(
        tokenizer=tiny.t5_tokenizer(), scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder=tiny.seeded(lambda: UMT5EncoderModel(UMT5Config(**tiny.t5_config().to_diff_dict()))),
        vae=tiny.seeded(lambda: AutoencoderKLWan(**sizes)), transformer=CASES["WanTransformer3DModel"].build(),
    ).save_pretrained(folder)  # fmt: skip
    return folder


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("a cat\na dog\n")
    return path


@pytest.fixture
def frames(monkeypatch):
    """The number of frames of every call of the pipeline."""
    from diffusers import WanPipeline

    seen, original = [], WanPipeline.prepare_latents

    def prepare(self, *args, **kwargs):
        latents = original(self, *args, **kwargs)
        seen.append(latents.shape[2])  # 1 + (frames - 1) / 4
        return latents

    monkeypatch.setattr(WanPipeline, "prepare_latents", prepare)
    return seen


def test_calibrated_on_videos_and_compared_by_pictures(dq_, wan, prompts, frames, tmp_path):
    out, image, numbers = tmp_path / "q", tmp_path / "x.png", tmp_path / "r.json"
    words = ("int8-smooth", "--min-features", 16, "--prompts", prompts, "--num-frames", 9, "--out", out)
    status, _, err = dq_("quantize", wan, *words, *CALL)
    assert status == 0 and frames == [3, 3], err
    config = json.loads((out / "transformer" / "config.json").read_text())["quantization_config"]
    assert config["calibration"]["kwargs"]["num_frames"] == 9
    status, _, err = dq_("generate", out, "a cat", "--out", image, "--num-frames", 1, *CALL)
    assert status == 0 and image.stat().st_size > 100 and frames[2:] == [1], err
    compare = ("--reference", wan, "--prompts", prompts, "--metrics", "psnr", "--records", 2, "--out", numbers)
    status, text, err = dq_("eval", out, *compare, "--num-frames", 1, *CALL)
    assert status == 0 and "psnr" in text and json.loads(numbers.read_text())["candidates"], err
    assert set(frames[3:]) == {1}


def test_a_video_is_refused_before_it_is_made(dq_, wan, prompts, frames, tmp_path):
    for given in ((), ("--num-frames", 9)):
        status, _, err = dq_("generate", wan, "a cat", "--out", tmp_path / "x.png", *given, *CALL)
        assert status == 2 and "WanPipeline makes videos" in err and "--num-frames 1" in err and err.count("\n") == 1
    assert not frames


def test_an_export_calibrates_with_what_was_given(dq_, wan, prompts, frames, tmp_path):
    out = tmp_path / "q"
    assert dq_("quantize", wan, "w4a4-nvfp4", "--min-features", 16, "--out", out, "--device", "cpu")[0] == 0
    words = (tmp_path / "e", "--format", "modelopt", "--prompts", prompts, "--num-frames", 5)
    status, _, err = dq_("export", out, *words, *CALL)
    assert status == 0 and frames == [2, 2], err
    assert (tmp_path / "e" / "transformer" / "config.json").is_file()


def test_what_makes_pictures_takes_no_frames(dq_, prompts, tmp_path):
    demo = dq.demo_path()
    status, _, err = dq_("generate", demo, "a", "--num-frames", 1, "--out", tmp_path / "x.png", "--device", "cpu")
    assert status == 2 and "FluxPipeline takes no argument num_frames: leave it out" in err
    status, _, err = dq_("generate", demo, "a", "--num-frames", 0)
    assert status == 2 and err == "dq: --num-frames must be at least 1, got 0\n"
    status, _, err = dq_("eval", demo, "--reference", demo, "--text", prompts, "--num-frames", 1)
    assert status == 2 and "--num-frames goes with --prompts FILE" in err
