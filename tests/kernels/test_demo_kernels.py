"""No layer of a model falls back silently: which kernel every layer of the demo runs on."""

import pytest
import torch

import dq
from dq.linear import layer_info, quantized_linears
from dq.showcase import demo_calibration, demo_pipeline

pytestmark = pytest.mark.gpu
KERNELS = {
    "fp8": "cublaslt-fp8",
    "int8": "int8-mma",
    "int8-smooth": "int8-mma",
    "w4a16": "w4a16-gemv",
    "w4a4-int4": "expand-fp8",
    "w4a4-int4-convrot": "expand-fp8",
    "w4a4-int4-svd": "expand-fp8",
    "w4a4-nvfp4": "expand-fp8",
    "w4a4-nvfp4-svd": "expand-fp8",
}


def _call(config, device: str) -> dict:
    """One denoiser call of the demo's shape."""
    half = dict(dtype=torch.bfloat16, device=device)
    return {
        "hidden_states": torch.randn(1, 64, config.in_channels, **half),
        "encoder_hidden_states": torch.randn(1, 32, config.joint_attention_dim, **half),
        "pooled_projections": torch.randn(1, config.pooled_projection_dim, **half),
        "timestep": torch.full((1,), 0.5, **half),
        "guidance": torch.full((1,), 2.0, device=device),
        "txt_ids": torch.zeros(32, 3, device=device),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(8.0), torch.arange(8.0)).to(device),
        "return_dict": False,
    }


@pytest.mark.parametrize("recipe", KERNELS)
def test_every_layer_runs_on_its_kernel(recipe):
    if torch.cuda.get_device_capability() not in ((8, 9), (9, 0)):
        pytest.skip("the kernels named here are those of Ada and Hopper")
    pipe = demo_pipeline("cuda")
    needs = dq.Recipe.load(recipe).needs_calibration
    dq.quantize(pipe, recipe, progress=False, calibration=demo_calibration(2) if needs else None)
    model = pipe.transformer
    with torch.no_grad():
        out = model(**_call(model.config, "cuda"))[0]
    assert torch.isfinite(out).all()
    rows = layer_info(model)
    assert len(rows) == len(quantized_linears(model)) > 0 and all(row.calls for row in rows)
    wanted = {row.name: KERNELS[recipe] if row.activations else "w4a16-gemv" for row in rows}
    assert {row.name: row.backend for row in rows} == wanted
