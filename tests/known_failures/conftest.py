"""Tiny quantized models that several files read; a test that changes one takes a copy."""

import copy
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture(scope="session")
def quantized_flux(tiny):
    """preset -> (model, inputs, 16-bit output, quantized output, report), built once per preset."""
    import dq

    source, inputs, made = tiny.flux(), tiny.flux_inputs(batch=2), {}
    with torch.no_grad():
        reference = source(**inputs)[0]

    def make(preset):
        if preset not in made:
            model, recipe = copy.deepcopy(source), tiny.recipe(preset)
            records = [tiny.flux_inputs(seed=i) for i in range(2)] if recipe.needs_calibration else None
            report = dq.quantize(model, recipe, calibration=records, progress=False)
            with torch.no_grad():
                output = model(**inputs)[0]
            made[preset] = SimpleNamespace(
                model=model, source=source, inputs=inputs, reference=reference, output=output, report=report
            )
        return made[preset]

    return make
