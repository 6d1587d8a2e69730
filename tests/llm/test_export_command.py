"""export and generate --kv-cache of language models from the shell."""

import json

import pytest
import torch


@pytest.fixture(scope="module")
def folder(llm, tiny, tmp_path_factory):
    """A language model in W4A4-NVFP4, with its tokenizer."""
    import dq

    path = tmp_path_factory.mktemp("llm")
    model = llm.decoder(dtype=torch.bfloat16)
    dq.quantize(model, tiny.recipe("w4a4-nvfp4"), progress=False)
    model.save_pretrained(path)
    tiny.t5_tokenizer().save_pretrained(path)
    return path


def test_export_with_a_text(dq_, llm, folder, tmp_path):
    """NVFP4 activations need the scales that a text gives; the tokenizer goes along."""
    out, text = tmp_path / "out", tmp_path / "text.txt"
    text.write_text(llm.text)
    status, _, err = dq_("export", folder, out, "--device", "cpu")
    assert status == 2 and "give calibration=... or weight_only=True" in err and not out.exists()
    options = ["--text", text, "--samples", 2, "--length", 32, "--device", "cpu"]
    status, said, err = dq_("export", folder, out, "--format", "modelopt", *options)
    assert status == 0, err
    assert "modelopt" in said and (out / "tokenizer_config.json").is_file()
    assert json.loads((out / "hf_quant_config.json").read_text())["quantization"]["quant_algo"] == "NVFP4"
    assert dq_("export", folder, tmp_path / "b", "--weight-only", "--device", "cpu")[0] == 0


def test_generate_with_a_cache(dq_, folder):
    status, said, err = dq_("generate", folder, "the fox", "--kv-cache", "int4-kivi", "--max-new-tokens", 4,
                            "--device", "cpu")  # fmt: skip
    assert status == 0, err
    assert said.strip()
    status, _, err = dq_("generate", folder, "the fox", "--kv-cache", "int5")
    assert status == 2 and "unknown KV cache format 'int5'" in err
