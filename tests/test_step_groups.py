"""Static activation scales per group of denoising steps, and reconstruction as part of a recipe: the whole way."""

import copy

import pytest
import torch
from torch import nn

from dq.linear import quantized_linears
from dq.loop import quantize_model
from dq.planning import make_plan
from dq.recipe import Recipe, Reconstruct, Target
from dq.records import Record
from dq.registry import DQError


class Denoiser(nn.Module):
    """Inputs grow as time falls: what static scales suffer from."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x, timestep):
        return self.down(nn.functional.gelu(self.up(x)))


def _records():
    g = torch.Generator().manual_seed(0)
    times = [1.0 - i / 8 for i in range(8)]
    tops = [0.1, 0.11, 0.13, 0.5, 0.6, 5.5, 6.0, 6.1]
    return [
        Record((top * torch.rand(16, 32, generator=g), torch.tensor([t])), {}, step=i, steps=8, timestep=t)
        for i, (t, top) in enumerate(zip(times, tops, strict=True))
    ]


def _quantized(model, **changes):
    target = Target.from_dict({"weights": "int8/channel", "activations": "int8/tensor"} | changes)
    model = copy.deepcopy(model)
    quantize_model(model, make_plan(model, Recipe("test", target, min_features=8)), _records())
    return model


def test_groups_follow_the_step():
    torch.manual_seed(0)
    model = Denoiser()
    plain, grouped = _quantized(model), _quantized(model, step_groups=3, transforms=["smooth"])
    layer = grouped.up
    assert layer.config.step_groups == 3 and layer.input_scale.shape == (3, 1) and layer.input_edges.shape == (2,)
    assert (layer.input_scale.diff(dim=0) < 0).all()  # ascending time, falling inputs
    errors = []
    for m in (plain, grouped):
        lost = [(m(*r.args) - model(*r.args)).detach() for r in _records()[:3]]  # the small inputs
        errors.append(sum(float(e.square().sum()) for e in lost))
    assert errors[1] < errors[0] / 20
    x, params = _records()[0].args[0], layer.params
    assert torch.equal(params.input_scale, layer.input_scale[:1])  # outside of a call: the largest
    again = Denoiser()
    for name, old in quantized_linears(grouped).items():
        again.set_submodule(name, type(old)(old.in_features, old.out_features, old.config, dtype=old.compute_dtype))
    again.load_state_dict(grouped.state_dict())
    from dq.checkpoint import finish_model

    finish_model(again)
    for time in (0.1, 0.9):
        assert torch.equal(again(x, torch.tensor([time])), grouped(x, timestep=time))


def test_step_groups_complaints():
    for bad in ({"activations": "int8/token"}, {"step_groups": 1}, {"activations": "int8/tensor@mse"}):
        data = {"weights": "int8/channel", "activations": "int8/tensor", "step_groups": 3} | bad
        with pytest.raises(DQError, match="step_groups, from 2 to 64"):
            Target.from_dict(data)
    with pytest.raises(DQError, match="step_groups do not go with rotate: maxima per step"):
        _quantized(Denoiser(), step_groups=3, transforms=["rotate"])
    target = Target.from_dict({"weights": "int8/channel", "activations": "int8/tensor", "step_groups": 3})
    assert Target.from_dict(target.to_dict()) == target
    model = nn.Sequential(nn.Linear(32, 32))
    records = [Record((torch.randn(4, 32),), {}) for _ in range(2)]
    with pytest.raises(DQError, match="need records with timesteps"):
        quantize_model(model, make_plan(model, Recipe("test", target, min_features=8)), records)


def test_reconstruct_in_a_recipe(tiny, tmp_path):
    """Above the same recipe without it, the same bits again from a resume folder, and in the plan's remarks."""
    recipe = tiny.recipe("w4a4-int4")
    learned = recipe.with_(reconstruct=Reconstruct(iters=40, records=2))
    assert Recipe.from_dict(learned.to_dict()) == learned and learned.needs_calibration
    records = [Record((), tiny.flux_inputs(seed=i)) for i in range(3)]
    found = {}
    for name, chosen in (("plain", recipe), ("learned", learned), ("again", learned)):
        model = tiny.flux()
        report = quantize_model(
            model, make_plan(model, chosen), records, resume=None if name == "plain" else str(tmp_path / "resume")
        )
        found[name] = quantized_linears(model)
        if name == "learned":
            notes = [r for r in report.plan.remarks if "reconstruction, relative error" in r]
            assert len(notes) == 4
    changed = [n for n, x in found["plain"].items() if not torch.equal(x.qweight, found["learned"][n].qweight)]
    assert len(changed) > 4
    assert all(torch.equal(x.qweight, found["again"][n].qweight) for n, x in found["learned"].items())
    for bad in ({"iters": 0}, {"records": 0}, {"steps": 3}):
        with pytest.raises(DQError, match="reconstruct"):
            Reconstruct.from_dict(bad)
