"""What a damaged checkpoint gives: one line that says what is wrong, and never a model without its weights."""

import pytest
import torch
from torch import nn

import dq
from dq.checkpoint import layers_config, prepare_model
from dq.linear import quantized_linears
from dq.registry import DQError


@pytest.fixture
def config(tiny):
    """The description of a model of one quantized linear called "0"."""
    return layers_config(nn.Sequential(tiny.layer("int8")[0]))


def without(key):
    return lambda c: c.pop(key)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("kinds"), "damaged: KeyError: 'kinds'"),
        (without("layers"), "damaged: KeyError: 'layers'"),
        (lambda c: c.update(layers={}), "damaged: it names no quantized layer"),
        (lambda c: c.update(layers=[]), "damaged: AttributeError"),
        (lambda c: c.update(layers={"0": 5}), "damaged: TypeError"),
        (lambda c: c.update(layers={"0": {}}), "damaged: KeyError: 'kind'"),
        (lambda c: c.update(layers={"0": {"kind": "0"}}), "damaged: DQError: 0; got '0'"),
        (lambda c: c.update(layers={"0": {"kind": 1}}), "damaged: '0' refers to kind 1 of 1"),
        (lambda c: c.update(layers={"7": {"kind": 0}}), "quantizes '7', which Sequential lacks"),
        (lambda c: c.update(kinds=5), "damaged: TypeError"),
        (lambda c: c.update(kinds=[5]), "damaged: TypeError"),
        (lambda c: c.update(kinds=[{}]), "damaged: .*weights"),
        (lambda c: c.update(kinds=[{"weights": "int8"}]), "damaged: DQError: a spec is a table; got 'int8'"),
        (lambda c: c["kinds"][0]["weights"].update(format="int9"), "unknown format 'int9'"),
        (lambda c: c["kinds"][0].update(new=1), "unknown word 'new' in the description"),
        (lambda c: c["kinds"][0].update(steps=[["smoth", {}]]), "unknown transform 'smoth'"),
    ],
)
def test_damaged_configs(config, change, message):
    change(config)
    model = nn.Sequential(nn.Linear(64, 48))
    with pytest.raises(DQError, match=message):
        prepare_model(model, config, torch.float32)
    assert not quantized_linears(model)


@pytest.mark.parametrize("left", [0, 100, 0.5])
def test_truncated_files(tiny, tmp_path, left):
    """Named in one line: by dq where it looks first (shards), by diffusers where it reads a lone file before."""
    from diffusers import FluxTransformer2DModel

    from dq.pipelines.hf_config import read_headers

    model = tiny.flux()
    dq.quantize(model, tiny.recipe("int8"), progress=False)
    model.save_pretrained(tmp_path)
    (file,) = tiny.weight_files(tmp_path)
    data = file.read_bytes()
    file.write_bytes(data[: int(left * len(data)) if left < 1 else left])
    with pytest.raises(DQError, match=r"safetensors cannot be read .*: truncated, or not a safetensors file"):
        read_headers([file])
    with pytest.raises((DQError, OSError), match=file.name):
        FluxTransformer2DModel.from_pretrained(tmp_path)
