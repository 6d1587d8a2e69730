"""Every transformer and UNet class of diffusers: planned, quantized, run, saved and loaded with the same bits.

Classes without a tiny configuration are skipped with the reason, so that the list of what is not covered is seen.
"""

import importlib
import inspect
import pkgutil

import diffusers
import pytest
import torch
from tiny_models import CASES
from torch import nn

import dq
from dq.linear import quantized_linears
from dq.records import tensors

# Why there is no tiny model of a class.
WITHOUT = {
    "Cosmos3OmniTransformer": "takes a packed sequence of text, vision, sound and action with a dozen index tensors",
    "MotionAdapter": "has no forward of its own: its modules run inside UNetMotionModel",
    "RFD4ProteinaTransformer": "makes proteins: two dozen features per residue and pair, no diffusion pipeline input",
    "SanaWMTransformer3DModel": "needs camera poses and their rays",
    "WanAnimate2Transformer3DModel": "runs in two passes over a key/value cache of its own",
}


def classes():
    """Names of all models that diffusers defines in models.transformers and models.unets."""
    found = set()
    for kind in ("transformers", "unets"):
        package = importlib.import_module(f"diffusers.models.{kind}")
        for info in pkgutil.iter_modules(package.__path__):
            module = importlib.import_module(f"{package.__name__}.{info.name}")
            mine = (c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__)
            found.update(c.__name__ for c in mine if issubclass(c, diffusers.ModelMixin))
    return sorted(found)


COVERED = {name.partition("@")[0] for name in CASES}


def test_nothing_is_forgotten():
    """A class of a newer diffusers has to get a case, or a reason; at least 80 classes are really covered."""
    names = classes()
    if diffusers.__version__.startswith("0.42."):
        assert len(names) >= 87 and COVERED | WITHOUT.keys() == set(names) and not COVERED & WITHOUT.keys()
    assert len(COVERED & set(names)) >= 80


@pytest.mark.parametrize("name", sorted([*CASES, *(n for n in classes() if n not in COVERED)]))
def test_class(name, tiny, tmp_path):
    if name not in CASES:
        pytest.skip(f"{name}: {WITHOUT.get(name, 'new in this diffusers, no tiny configuration yet')}")
    case, recipe = CASES[name], tiny.recipe("fp8")
    model = case.build()
    linears = {n for n, m in model.named_modules() if type(m) is nn.Linear}
    reference = run(model, case)

    plan = dq.plan(model, recipe)
    members = [m for row in plan.rows for m in row.members]
    assert len(members) == len(set(members)) and linears <= set(members)
    assert all(row.reason for row in plan.rows if row.target is None)

    dq.quantize(model, recipe, progress=False)
    assert set(quantized_linears(model)) == {m for row in plan.quantized for m in row.members}
    quantized = run(model, case)
    assert 0 < float((quantized - reference).norm() / reference.norm()) < 0.5

    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert set(quantized_linears(loaded)) == set(quantized_linears(model))
    assert torch.equal(run(loaded, case), quantized)


def run(model, case):
    with torch.no_grad():
        return tensors(model(**case.inputs()))[0]  # new ones: some models change theirs in place
