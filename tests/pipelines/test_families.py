"""What the families claim of diffusers' models, checked on tiny ones: shared inputs, parts, folds, default skips."""

import re
from collections import defaultdict

import pytest
import torch
from tiny_models import CASES
from torch import nn

from dq.family import FAMILIES, find_family
from dq.folding import present, refusal, smooth_weights
from dq.registry import DQError

KNOWN = [f for f in FAMILIES if any(c.partition("@")[0] in f.classes for c in CASES)]
OF = {name: next((f for f in KNOWN if name.partition("@")[0] in f.classes), None) for name in CASES}
NAMED = [name for name, family in OF.items() if family is not None]


def linears(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}


def inputs_of(model, inputs):
    """linear -> the tensors it was called with."""
    seen = defaultdict(list)

    def hook(name):
        return lambda module, args, kwargs: seen[name].append((*args, *kwargs.values())[0])

    handles = [m.register_forward_pre_hook(hook(n), with_kwargs=True) for n, m in linears(model).items()]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return seen


def same(a, b):
    return len(a) == len(b) and all(x is y or torch.equal(x, y) for x, y in zip(a, b, strict=True))


def groups_of(family, names):
    """Every group of linears that the family says share an input, where two or more of them are there."""
    found = {tuple(p for p in family.partners(family.inputs, n) if p in names) for n in names}
    return {g for g in found if len(g) > 1}


WRONG = {"StableCascadeUNet": "keys and values read text and image joined; nothing in names or classes says so"}


@pytest.mark.parametrize("name", CASES)
def test_claimed_inputs_are_shared(name):
    """Also what detection assumes by names. Where that is wrong, calibration finds out."""
    model = CASES[name].build()
    family, seen = find_family(model), inputs_of(model, CASES[name].inputs())
    wrong = [g for g in groups_of(family, list(linears(model))) if not all(same(seen[g[0]], seen[m]) for m in g)]
    assert bool(wrong) == (name in WRONG), wrong


@pytest.mark.parametrize("name", NAMED)
def test_shared_inputs_are_claimed(name):
    """Linears of one block that would be quantized and read one tensor stand in one group."""
    model, family = CASES[name].build(), OF[name]
    seen = inputs_of(model, CASES[name].inputs())
    wanted = [n for n in seen if family.block_of(n) and not family.keep_reason(n) and not family.is_modulation(n)]
    for i, a in enumerate(wanted):
        for b in wanted[:i]:
            if family.block_of(a) == family.block_of(b) and same(seen[a], seen[b]):
                assert b in family.partners(family.inputs, a), (a, b)


@pytest.mark.parametrize("family", KNOWN, ids=lambda f: f.name)
def test_every_pattern_names_something(family):
    """A misspelt pattern would do nothing, silently."""
    names = {n for c, f in OF.items() if f is family for n, _ in CASES[c].build().named_modules()}
    everything = [p for groups in (family.inputs, family.smooth, family.lowrank) for g in groups for p in g]
    # Of a UNet's shortcuts, whose parts hang on their place, the places that only a deeper one has count, too.
    everything += [family.blocks[0], *(re.sub(r"(?<=\.)\d+(?=\.)", "*", p) for p, _ in family.k_parts)]
    optional = ("vace_blocks", "audio", "video_to")  # only some of the family's models have these
    for pattern in everything:
        assert any(family.partners(((pattern,),), n) == (n,) and n == _filled(pattern, n) for n in names) or any(
            word in pattern for word in optional
        ), pattern


def _filled(pattern, name):
    from dq.family import fill, match_indices

    found = match_indices(pattern, name)
    return None if found is None else fill(pattern, found)


def factors(width, seed):
    return (torch.rand(width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 4).exp2() / 4


@pytest.mark.parametrize("name", NAMED)
def test_folds_are_exact(name):
    """Every fold that fits, one after the other, with factors of 1/4 to 4: the output stays, in float64 up to what the
    model itself computes in float32."""
    case, family = CASES[name], OF[name]
    model, inputs = case.build(torch.float64), case.inputs(torch.float64)
    with torch.no_grad():
        before = first(model(**inputs))
    done = 0
    for i, fold in enumerate(family.folds_in(list(linears(model)))):
        width = model.get_submodule(fold.consumers[0]).in_features
        try:
            fold = present(model, fold)
        except DQError:
            continue
        if any(refusal(fold, model.get_submodule(p), width) for p in fold.producers):
            continue
        smooth_weights(model, fold, factors(width, i))
        done += 1
    with torch.no_grad():
        after = first(model(**inputs))
    assert done >= 2 and float((after - before).norm() / before.norm()) < 2e-6


def first(output):
    output = output[0]
    return output[0] if isinstance(output, list) else output


@pytest.mark.parametrize("family", KNOWN, ids=lambda f: f.name)
def test_every_fold_fits_somewhere(family):
    """In some model of the family, alone and with a wrong model output if the consumers were not scaled too."""
    for pattern in family.folds:
        fitting = [c for c, f in OF.items() if f is family and fits(CASES[c].build(), pattern)]
        optional = ("vace_blocks", "audio", "video_to")
        assert fitting or any(word in pattern.consumers[0] for word in optional), pattern


def fits(model, pattern):
    from dataclasses import replace

    from dq.family import Family

    for fold in Family("x", folds=(replace(pattern),)).folds_in(list(linears(model))):
        width = model.get_submodule(fold.consumers[0]).in_features
        try:
            there = present(model, fold)
        except DQError:
            continue
        if not any(refusal(there, model.get_submodule(p), width) for p in there.producers):
            return True
    return False


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "ChromaTransformer2DModel", "Flux2Transformer2DModel",
                                  "HunyuanVideoTransformer3DModel"])  # fmt: skip
def test_parts_of_concatenated_inputs(name):
    """With all values of the attention zero the first part of the input is zero; the rest does not depend on them."""
    case, family = CASES[name], OF[name]
    model = case.build()
    before, width = inputs_of(model, case.inputs()), 64
    ((pattern, _),) = family.k_parts
    last = next(n for n in linears(model) if _filled(pattern, n) == n)
    values = last.replace("proj_out", "attn.to_v").replace("to_out", "to_qkv_mlp_proj")
    source = model.get_submodule(values)
    rows = slice(2 * width, 3 * width) if "mlp" in values else slice(0, width)
    with torch.no_grad():
        source.weight[rows] = 0
        if source.bias is not None:
            source.bias[rows] = 0
    after = inputs_of(model, case.inputs())
    assert not after[last][0][..., :width].any() and before[last][0][..., :width].any()
    assert torch.equal(after[last][0][..., width:], before[last][0][..., width:])
