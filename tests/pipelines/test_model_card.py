"""Pushing to the hub, without a network: what the folder that would be uploaded holds, of both libraries."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from huggingface_hub import ModelCard
from huggingface_hub.errors import EntryNotFoundError
from transformers import LlamaForCausalLM

import dq
from dq.pipelines.model_card import BEGIN, END, write_card
from dq.pipelines.origin import licence_of, origin_of, repository

CARD = """---
license: other
license_name: tiny-research
license_link: LICENSE.md
---
# Tiny
"""
REVISION = "0123456789abcdef"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Stands in for the hub: nothing is there, uploads are copied to `hub.pushed`."""
    pushed = tmp_path / "pushed"
    state = SimpleNamespace(pushed=pushed, remote=None, repositories=[])
    load = ModelCard.load

    def load_card(where, **kwargs):
        if Path(str(where)).exists():
            return load(where, **kwargs)
        if state.remote is None:
            raise EntryNotFoundError("no card")
        return ModelCard(state.remote)

    def create_repo(repo_id, **kwargs):
        state.repositories.append(repo_id)
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(folder_path, **kwargs):
        shutil.copytree(folder_path, pushed)

    class Api:
        def __init__(self):
            self.create_repo = create_repo

        def create_commit(self, operations, **kwargs):
            for op in operations:
                target = pushed / op.path_in_repo
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(op.path_or_fileobj, target)

    monkeypatch.setattr(ModelCard, "load", staticmethod(load_card))
    monkeypatch.setattr("diffusers.utils.hub_utils.create_repo", create_repo)
    for module in ("diffusers.models.modeling_utils", "diffusers.pipelines.pipeline_utils"):
        monkeypatch.setattr(f"{module}.create_repo", create_repo)
    monkeypatch.setattr("diffusers.utils.hub_utils.upload_folder", upload_folder)
    monkeypatch.setattr("transformers.utils.hub.hf_api", Api)
    monkeypatch.setattr("transformers.modeling_utils.hf_api", Api)
    return state


@pytest.fixture
def cached(tiny, tmp_path):
    """A pipeline and a language model as the hub's cache holds them, with card and licence file."""
    made = {}
    for name, source in (("flux", tiny.flux_pipeline(torch.bfloat16)), ("llama", tiny.llama(torch.bfloat16))):
        folder = tmp_path / "hub" / f"models--lab--{name}" / "snapshots" / REVISION
        source.save_pretrained(folder)
        (folder / "README.md").write_text(CARD)
        (folder / "LICENSE.md").write_text("Research only.")
        made[name] = folder
    return made


def check(folder, base, recipe):
    """The card of a pushed folder: metadata, section, licence file; returns it."""
    card = ModelCard.load(folder / "README.md")
    data = card.data.to_dict()
    assert (data["license"], data["license_name"], data["license_link"]) == ("other", "tiny-research", "LICENSE.md")
    assert data["base_model"] == base and data["base_model_relation"] == "quantized"
    assert {"dq", recipe} <= set(data["tags"])
    assert card.text.count(BEGIN) == card.text.count(END) == 1
    assert REVISION in card.text and f"| {recipe} |" in card.text and "import dq" in card.text
    assert "licence `tiny-research` (LICENSE.md)" in card.text and "automatically generated" not in card.text
    assert (folder / "LICENSE.md").read_text() == "Research only."
    recorded = card.text.split("```json")[1].split("```")[0]
    assert json.loads(recorded)["recipe"]["name"] == recipe
    return card


@pytest.mark.parametrize("how", ["push_to_hub", "save_pretrained"])
def test_a_pipeline(tiny, hub, cached, tmp_path, how):
    pipe = FluxPipeline.from_pretrained(cached["flux"], dtype=torch.bfloat16)
    dq.quantize(pipe, tiny.recipe("w4a4-nvfp4"), progress=False)
    if how == "push_to_hub":
        pipe.push_to_hub("me/flux-w4a4")
    else:
        pipe.save_pretrained(str(tmp_path / "out"), push_to_hub=True, repo_id="me/flux-w4a4")
    card = check(hub.pushed, "lab/flux", "w4a4-nvfp4")
    assert "| transformer | w4a4-nvfp4 | 40 |" in card.text and "lab/flux/transformer" in card.text
    assert 'FluxPipeline.from_pretrained("me/flux-w4a4"' in card.text and card.data.library_name == "diffusers"
    again = FluxPipeline.from_pretrained(hub.pushed, dtype=torch.bfloat16)
    assert again.transformer.dq_artifact["licence"]["license_name"] == "tiny-research"
    assert again.transformer.dq_artifact["revision"] == REVISION


@pytest.mark.parametrize("how", ["quantize", "on load"])
@pytest.mark.parametrize("kind", ["flux", "llama"])
def test_a_model(tiny, hub, cached, kind, how):
    """Quantized in memory or while loading, and pushed a second time from what was pushed."""
    cls = {"flux": FluxTransformer2DModel, "llama": LlamaForCausalLM}[kind]
    folder, recipe = cached[kind] / ("transformer" if kind == "flux" else ""), tiny.recipe("int8")
    if how == "quantize":
        model = cls.from_pretrained(folder)
        dq.quantize(model, recipe, progress=False)
    else:
        model = cls.from_pretrained(folder, quantization_config=dq.DQConfig(recipe))
    for _ in range(2):
        if hub.pushed.exists():
            shutil.rmtree(hub.pushed)
        model.push_to_hub("me/int8")
        (card,) = [ModelCard.load(hub.pushed / "README.md")]
        assert REVISION in card.text and card.data.to_dict()["license_name"] == "tiny-research"
        hub.remote = str(card)
    if how == "quantize":  # whose licence file is found through the model's folder
        assert card.text.count(BEGIN) == 1
    assert card.data.base_model == f"lab/{kind}" and cls.from_pretrained(hub.pushed).is_quantized


def test_a_card_that_is_there_keeps_its_words(tiny, hub, tmp_path):
    """Text and metadata of the repository's own card stay; our section is replaced, not repeated."""
    hub.remote = "---\nlicense: mit\ntags: [mine]\n---\n# My model\n\nBy me.\n"
    model = tiny.flux()
    dq.quantize(model, tiny.recipe("int8"), progress=False)
    for _ in range(2):
        shutil.rmtree(hub.pushed, ignore_errors=True)
        model.push_to_hub("me/mine")
        card = ModelCard.load(hub.pushed / "README.md")
        hub.remote = str(card)
    assert card.data.license == "mit" and card.data.tags == ["mine", "dq", "int8"]
    assert card.text.strip().startswith("# My model\n\nBy me.") and card.text.count(BEGIN) == 1
    assert "licence of the source is not known here" in card.text and card.data.base_model is None


def test_16_bit_models_are_pushed_as_ever(tiny, hub):
    tiny.flux().push_to_hub("me/plain")
    assert BEGIN not in (hub.pushed / "README.md").read_text()
    shutil.rmtree(hub.pushed)
    tiny.llama().push_to_hub("me/plain")
    assert BEGIN not in (hub.pushed / "README.md").read_text()


def test_written_beside_a_saved_model(tiny, hub, tmp_path):
    """Without a push: `write_card` on the folder; nothing for what is not quantized."""
    model = tiny.llama()
    write_card(model, tmp_path)
    assert not (tmp_path / "README.md").exists()
    dq.quantize(model, tiny.recipe("w4a16"), progress=False)
    write_card(model, tmp_path)
    assert "| LlamaForCausalLM | w4a16 | 14 |" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    "path, source, revision",
    [
        ("/c/hub/models--lab--flux/snapshots/abc/transformer", "lab/flux/transformer", "abc"),
        ("/c/hub/models--lab--flux/snapshots/abc", "lab/flux", "abc"),
        ("/c/hub/models--gpt2/snapshots/abc", "gpt2", "abc"),
        ("/data/flux/transformer", "/data/flux/transformer", ""),
    ],
)
def test_origins(path, source, revision):
    assert origin_of(path) == {"source": source, "revision": revision}
    assert repository(source) == ("lab/flux" if "lab" in source else "")


def test_places_without_an_origin_or_licence(tmp_path):
    assert origin_of("") == origin_of(None) == {}
    assert licence_of("") == licence_of(tmp_path) == licence_of(tmp_path / "none") == {}
    (tmp_path / "README.md").write_text("---\nlicense: [broken\n---\n")
    assert licence_of(tmp_path) == {}
