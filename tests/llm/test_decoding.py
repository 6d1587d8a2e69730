"""Decoding with static shapes, and the bench of it: the logits are transformers' own."""

import json

import pytest
import torch

import dq
from dq.cli import main
from dq.eval.bench import generation
from dq.pipelines.decoding import StaticDecoder, random_decoder, shape
from dq.registry import DQError


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("recipe", [None, "int8"])
def test_logits(llm, kind, recipe):
    model = llm.decoder(kind)
    if recipe:
        dq.quantize(model, dq.Recipe.load(recipe).with_(min_features=16), progress=False)
    ids = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = model(input_ids=ids).logits
    decoder = StaticDecoder(model, 16, batch=2, compiled=False)
    got = [decoder.prompt(ids[:, :9])]
    got += [decoder.token(ids[:, i : i + 1], torch.tensor([i])) for i in (9, 10, 11)]
    assert torch.allclose(torch.stack(got, 1), want[:, 8:], atol=1e-4, rtol=1e-4)


def test_other_layouts_are_refused(llm):
    with pytest.raises(DQError, match="no q_proj"):
        StaticDecoder(llm.decoder("Phi3"), 8, compiled=False)


def test_shapes(tmp_path, llm):
    config = llm.decoder("Qwen2").config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = random_decoder(shape(str(tmp_path)), torch.device("cpu"))
    assert type(model).__name__ == "Qwen2ForCausalLM" and model.lm_head.weight.shape == (128, 64)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert shape("llama-3.1-8b")["intermediate_size"] == 14336
    with pytest.raises(DQError, match=r"did you mean.*llama-3.1-8b"):
        shape("llama-3.1-8c")


def test_measure(llm):
    decoder = StaticDecoder(llm.decoder(), 32, compiled=False)
    found = generation.measure(decoder, 128, prompt=16, tokens=4, repeat=2)
    assert found["prefill"] == pytest.approx(16 / found["ttft"]) and found["decode"] == pytest.approx(1 / found["tpot"])


def test_command(llm, tmp_path, capsys):
    (tmp_path / "config.json").write_text(
        json.dumps(
            llm.decoder(hidden_size=256, intermediate_size=256, head_dim=64, num_key_value_heads=4).config.to_dict()
        )
    )
    argv = ["bench", "generation", "--shape", str(tmp_path), "--prompt", "8", "--tokens", "2", "--device", "cpu"]
    assert main([*argv, "--recipes", "fp8", "--json", str(tmp_path / "x.json")]) == 0
    said = capsys.readouterr().out
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [r["engine"] for r in rows] == ["bf16", "fp8"] and rows[1]["gb"] < rows[0]["gb"]
    assert "1.00x" in said and "torch-reference" in said
    assert main([*argv, "--recipes", "w4a16-gptq"]) == 2 and "needs calibration" in capsys.readouterr().err


def test_a_recipe_that_fails_leaves_the_others(llm, tmp_path, monkeypatch):
    from dq import showcase_speed

    config = llm.decoder().config
    config.save_pretrained(tmp_path)
    own = showcase_speed._row

    def row(name, model, *rest, **sizes):
        if name == "int8":
            raise RuntimeError("no kernel for it")
        return own(name, model, *rest, **sizes)

    monkeypatch.setattr(showcase_speed, "_row", row)
    sizes = dict(prompt=8, tokens=2, device="cpu")
    rows = showcase_speed.bench_generation(str(tmp_path), ["bf16", "int8", "fp8"], **sizes)["rows"]
    assert [r["engine"] for r in rows] == ["bf16", "int8", "fp8"] and rows[1]["failed"].endswith("no kernel for it")
    said = generation.text(rows).splitlines()
    assert said[2].startswith("int8: RuntimeError") and len(said[1].split()) == len(said[3].split())
