"""The demo on a GPU against the same quantized pipeline on the CPU, where the plain-torch reference runs."""

import copy

import pytest
import torch

import dq
from dq.linear import layer_info, quantized_linears
from dq.showcase import demo_pipeline

pytestmark = pytest.mark.gpu


def _images(pipe, prompts):
    generators = [torch.Generator("cpu").manual_seed(i) for i in range(len(prompts))]
    out = pipe(prompts, generator=generators, output_type="pt", **dq.demo_kwargs()).images
    return out.float().cpu()


def _psnr(a, b):
    return (-10 * torch.log10((a - b).square().mean((1, 2, 3)).clamp(min=1e-12))).tolist()


def _call(seed: int, device: str) -> dict:
    """Denoiser inputs of the demo's shape: 64 image tokens, 32 text tokens."""
    g = torch.Generator().manual_seed(seed)
    config = demo_config()
    half = torch.bfloat16
    tensors = {
        "hidden_states": torch.randn(2, 64, config["in_channels"], generator=g).to(half),
        "encoder_hidden_states": torch.randn(2, 32, config["joint_attention_dim"], generator=g).to(half),
        "pooled_projections": torch.randn(2, config["pooled_projection_dim"], generator=g).to(half),
        "timestep": torch.full((2,), 0.5, dtype=half),
        "guidance": torch.full((2,), 2.0),
        "txt_ids": torch.zeros(32, 3),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(8.0), torch.arange(8.0)),
    }
    return {k: v.to(device) for k, v in tensors.items()} | {"return_dict": False}


def demo_config() -> dict:
    import json
    from pathlib import Path

    return json.loads((Path(dq.demo_path()) / "transformer" / "config.json").read_text())


def _relative(a, b) -> float:
    return float((a.double().cpu() - b.double().cpu()).norm() / b.double().cpu().norm())


def _layer_inputs(model, calls):
    """layer name -> inputs it received over the calls."""
    seen: dict[str, list] = {}
    hooks = [
        m.register_forward_pre_hook(lambda m, a, _n=n: seen.setdefault(_n, []).append(a[0]))
        for n, m in quantized_linears(model).items()
    ]
    with torch.no_grad():
        for kwargs in calls:
            model(**kwargs)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize(
    ("recipe", "kernel", "level"),
    [
        ("fp8", "cublaslt-fp8", 4e-3),
        ("w4a4-nvfp4", "expand-fp8-faithful", 5e-2),
        ("w4a4-int4-convrot", "int8-mma", 2e-2),
    ],
)
def test_every_layer_equals_the_cpu_reference(recipe, kernel, level):
    """Each layer on the inputs it has inside the model, on the recipe's own activation grid: the same codes, so only
    BF16 output rounding (2^-9) is left, and what E4M3 rounds of 4-bit values times a block scale. A rotation's last
    bits differ between devices: a few codes at ties may flip there."""
    model = demo_pipeline("cpu").transformer
    dq.quantize(model, recipe, progress=False, activations="faithful")
    inputs = _layer_inputs(model, [_call(seed, "cpu") for seed in range(2)])
    on_gpu = copy.deepcopy(model).to("cuda")
    for name, layer in quantized_linears(model).items():
        for x in inputs[name]:
            with torch.no_grad():
                error = _relative(on_gpu.get_submodule(name)(x.cuda()), layer(x))
            assert error < (level if layer.config.activations else 4e-3), (name, error)
    assert {i.backend for i in layer_info(on_gpu) if i.activations} == {kernel}
    assert {i.backend for i in layer_info(model)} == {"torch-reference"}


@pytest.mark.parametrize("recipe", ["fp8", "w4a4-nvfp4"])
def test_images_equal_the_cpu_reference(recipe):
    """Images after 20 steps: the difference between the devices stays below what quantization itself changes."""
    prompts = dq.demo_prompts(8)
    exact = _images(demo_pipeline("cpu"), prompts)
    pipe = demo_pipeline("cpu")
    dq.quantize(pipe, recipe, progress=False)
    reference = _images(pipe, prompts)
    gpu = _images(pipe.to("cuda"), prompts)
    same, changed = _psnr(gpu, reference), _psnr(reference, exact)
    bf16 = _psnr(_images(demo_pipeline("cuda"), prompts), exact)
    print(f"{recipe}: PSNR gpu/cpu {sum(same) / 8:.1f} dB, bf16 {sum(bf16) / 8:.1f}, q/bf16 {sum(changed) / 8:.1f}")
    assert sum(same) / 8 > sum(changed) / 8
