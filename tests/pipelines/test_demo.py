"""The demo model as it ships, outlier injection, and the training script on a made-up data set."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from dq.pipelines.demo import demo_kwargs, demo_path, demo_prompts
from dq.registry import DQError


@pytest.fixture(scope="module")
def pipe():
    from diffusers import FluxPipeline

    pipe = FluxPipeline.from_pretrained(demo_path())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _inputs(dtype, batch=2):
    """Inputs of the demo's transformer as FluxPipeline makes them."""
    g = torch.Generator().manual_seed(0)
    ids = torch.zeros(8, 8, 3)
    ids[..., 1], ids[..., 2] = torch.arange(8)[:, None], torch.arange(8)[None]
    return dict(
        hidden_states=torch.randn(batch, 64, 64, generator=g).to(dtype),
        encoder_hidden_states=torch.randn(batch, 32, 128, generator=g).to(dtype),
        pooled_projections=torch.randn(batch, 128, generator=g).to(dtype),
        timestep=torch.tensor([0.9, 0.3], dtype=dtype),
        guidance=torch.full((batch,), 2.0, dtype=dtype),
        img_ids=ids.view(-1, 3),
        txt_ids=torch.zeros(32, 3),
        return_dict=False,
    )


@pytest.fixture
def transformer():
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel.from_pretrained(demo_path(), subfolder="transformer").eval()


def _channel_ratios(transformer, inputs):
    """{linear: largest channel absmax over the median channel absmax of its input}, and the output."""
    ratios, hooks = {}, []

    def watch(name):
        def hook(module, args):
            peak = args[0].detach().abs().flatten(0, -2).amax(0)
            ratios[name] = (peak.max() / peak.median()).item()

        return hook

    for name, module in transformer.named_modules():
        if isinstance(module, torch.nn.Linear):
            hooks.append(module.register_forward_pre_hook(watch(name)))
    with torch.no_grad():
        out = transformer(**inputs)[0]
    for hook in hooks:
        hook.remove()
    return ratios, out


def test_files_are_small():
    sizes = [os.path.getsize(os.path.join(d, f)) for d, _, files in os.walk(demo_path()) for f in files]
    assert sum(sizes) <= 34_000_000
    assert max(sizes) <= 15_000_000


def test_loads_plainly_in_one_dtype(pipe):
    parts = {name: getattr(pipe, name) for name in ("transformer", "vae", "text_encoder", "text_encoder_2")}
    assert {m.dtype for m in parts.values()} == {torch.float32}
    counts = {name: sum(p.numel() for p in m.parameters()) for name, m in parts.items()}
    assert counts["transformer"] == 13_577_280
    assert counts["vae"] < 1_250_000
    assert counts["text_encoder"] + counts["text_encoder_2"] < 1_300_000
    assert pipe.transformer.config.guidance_embeds
    assert pipe.transformer.inner_dim == 256


def test_loads_without_warnings():
    code = (
        "import sys, torch; from diffusers import FluxPipeline; "
        "FluxPipeline.from_pretrained(sys.argv[1], dtype=torch.bfloat16)"
    )
    run = subprocess.run([sys.executable, "-c", code, demo_path()], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    # torchao, where it is installed, logs about itself whenever diffusers is imported.
    known = ("Loading", "torchao", "_pytree")
    noise = [x for x in run.stderr.replace("\r", "\n").splitlines() if x.strip() and not any(k in x for k in known)]
    assert noise == []


def test_prompts():
    assert len(set(demo_prompts(256))) == 256
    assert demo_prompts(3) == demo_prompts(24)[:3]
    for n in (0, 257):
        with pytest.raises(DQError, match="demo prompts"):
            demo_prompts(n)


def test_seen_captions_give_their_picture(pipe):
    """'stop sign' is a red octagon, 'green apple' is green, on white; also with a negative prompt."""
    prompts = ["stop sign", "green apple"]
    for extra in ({}, {"true_cfg_scale": 2.0, "negative_prompt": ["", ""]}):
        generator = torch.Generator().manual_seed(0)
        images = pipe(prompts, generator=generator, output_type="np", **{**demo_kwargs(), **extra}).images
        assert images.shape == (2, 128, 128, 3)
        (r, g, b), apple = images[0, 60, 64], images[1, 80, 64]
        assert r > 0.8 and g < 0.45 and b < 0.45
        assert apple[1] > apple[0] + 0.1 and apple[1] > apple[2] + 0.2
        assert images[:, 2, 2].min() > 0.93


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_injected_outliers_keep_the_output(transformer, dtype):
    from dq.pipelines.demo.outliers import inject_outliers, outlier_sites

    transformer.to(dtype)
    before, reference = _channel_ratios(transformer, _inputs(dtype))
    report = inject_outliers(transformer)
    after, out = _channel_ratios(transformer, _inputs(dtype))
    tolerance = 1e-4 if dtype == torch.float32 else 1e-11
    assert (out - reference).norm() / reference.norm() < tolerance
    assert report["channels"] == 3 * len(outlier_sites(transformer)) == 3 * (3 * 5 + 6 * 2)
    names = {id(m): n for n, m in transformer.named_modules()}
    changed = [names[id(c)] for s in outlier_sites(transformer) for c in s.consumers]
    assert len(changed) == 3 * 10 + 6 * 5
    # proj_out's median is that of the GELU part, and its outliers lie in the attention part
    grown = {n: after[n] / before[n] for n in changed if not n.endswith("proj_out")}
    assert min(after[n] for n in changed) > 10
    assert np.median(list(grown.values())) > 10


def test_outliers_are_repeatable(transformer):
    from dq.pipelines.demo.outliers import inject_outliers

    weight = transformer.transformer_blocks[0].attn.to_q.weight
    saved = weight.detach().clone()
    report = inject_outliers(transformer, seed=3)["sites"]["transformer_blocks.0.attn.to_qkv"]
    changed = (weight.detach() != saved).any(0).nonzero().flatten().tolist()
    assert changed == report["channels"]
    assert all(20 <= f <= 60 for f in report["factors"])


def test_outliers_refuse(transformer):
    from dq.pipelines.demo.outliers import inject_outliers

    with pytest.raises(DQError, match="rows=False"):
        inject_outliers(transformer, rows=True)
    with pytest.raises(DQError, match="fraction"):
        inject_outliers(transformer, fraction=0.0)
    with pytest.raises(DQError, match="not into Linear"):
        inject_outliers(torch.nn.Linear(2, 2))

    class Wrapped(torch.nn.Linear):
        pass

    transformer.transformer_blocks[1].attn.to_k = Wrapped(256, 256)
    with pytest.raises(DQError, match=r"transformer_blocks\.1.*Wrapped"):
        inject_outliers(transformer)


def _fake_data(path, n=20):
    rng = np.random.default_rng(0)
    colors, things = ["red", "green", "blue", "dark", "pale"], ["ball", "house", "tree with leaves", "small fish"]
    captions = [f"{colors[i % 5]} {things[i % 4]}: variant {i}" for i in range(n)]
    np.savez(
        path,
        images=rng.integers(0, 256, (n, 16, 16, 3), dtype=np.uint8),
        caption=np.array(captions),
        tags=np.array(["round, toy, thing"] * n),
        category=np.array(["Objects", "Animals & Nature"] * (n // 2)),
        skin_variant=np.arange(n) % 2,
    )


def test_training_script_runs_resumes_and_exports(tmp_path):
    """Two steps of everything at the size "tiny", through the command line's own entry point."""
    from diffusers import FluxPipeline

    from dq.pipelines.demo import state, train

    _fake_data(tmp_path / "data.npz")
    common = ["--data", str(tmp_path / "data.npz"), "--tokenizers", str(tmp_path / "tok"), "--size", "tiny"]
    common += ["--device", "cpu", "--batch", "2", "--max-steps", "2"]
    train.main(["prepare", *common])
    train.main(["vae", *common, "--out", str(tmp_path / "s1")])
    for number, phase in enumerate(("flow", "flow", "distill"), 1):
        folders = ["--resume", str(tmp_path / f"s{number}"), "--out", str(tmp_path / f"s{number + 1}")]
        train.main([phase, *common, *folders])
    parts, meta = state.load_state(str(tmp_path / "s4"))
    assert [piece["phase"] for piece in meta["pieces"]] == ["vae", "flow", "flow", "distill"]
    assert set(parts) == {"transformer", "vae", "text_encoder", "text_encoder_2"}
    first = state.load_state(str(tmp_path / "s2"))[0]
    assert not torch.equal(first["transformer"]["x_embedder.weight"], parts["transformer"]["x_embedder.weight"])

    train.main(["export", *common, "--resume", str(tmp_path / "s4"), "--out", str(tmp_path / "out")])
    pipe = FluxPipeline.from_pretrained(tmp_path / "out")
    pipe.set_progress_bar_config(disable=True)
    images = pipe("red ball", **{**demo_kwargs(), "num_inference_steps": 1}, output_type="np").images
    assert images.shape == (1, 128, 128, 3) and np.isfinite(images).all()
