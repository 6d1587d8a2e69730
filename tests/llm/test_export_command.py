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
    # Other commands read exports by dq's own linears, also those that transformers does not read.
    machine = ("--device", "cpu")
    said = [dq_("generate", one, "the fox", "--max-new-tokens", 4, *machine) for one in (folder, out)]
    assert said[0][:2] == said[1][:2] and said[0][0] == 0, said
    status, table, err = dq_("eval", out, tmp_path / "b", "--reference", folder, *options[:2], "--length", 32,
                             "--count", 2, "--out", tmp_path / "n.json", *machine)  # fmt: skip
    assert status == 0 and f"{out}: 14 layers on torch-reference (nvfp4-token)" in table, (table, err)
    kl = {n: s["kl[32]"]["value"] for n, s in json.loads((tmp_path / "n.json").read_text())["scores"].items() if n in
          (str(out), str(tmp_path / "b"))}  # fmt: skip
    assert kl[str(out)] < 1e-6 < kl[str(tmp_path / "b")]

    # What is exported is the end: it is not exported again, nor corrected.
    learn = ("correct", tmp_path / "b", "--reference", folder, "--text", text, "--length", 32, "--samples", 8)
    for argv in (("export", tmp_path / "b", tmp_path / "c"), (*learn, "--out", tmp_path / "c")):
        status, _, err = dq_(*argv, *machine)
        assert status == 2 and "is in the form of compressed-tensors: this takes what dq.quantize made" in err


def test_generate_with_a_cache(dq_, folder):
    status, said, err = dq_("generate", folder, "the fox", "--kv-cache", "int4-kivi", "--max-new-tokens", 4,
                            "--device", "cpu")  # fmt: skip
    assert status == 0, err
    assert said.strip()
    status, _, err = dq_("generate", folder, "the fox", "--kv-cache", "int5")
    assert status == 2 and "unknown KV cache format 'int5'" in err
