"""Times and bytes of greedy generation: definitions, what runs, what is refused; and a conversation from the shell."""

import io

import pytest
import torch

import dq
from dq.cli import main
from dq.pipelines import generation
from dq.pipelines.generation import measure_generation


@pytest.fixture
def clock(monkeypatch):
    """Every pass through the model takes a second per token that goes in."""
    now = [0.0]
    monkeypatch.setattr(generation, "_now", lambda device: now[0])

    def wind(model):
        model.register_forward_pre_hook(
            lambda m, a, k: now.__setitem__(0, now[0] + k["input_ids"].shape[1]), with_kwargs=True
        )
        return model

    return wind


def test_definitions(tiny, clock):
    """A prompt of 12 takes 12 s, each of 4 further tokens 1 s; 2 rows of 5 tokens in 16 s."""
    found = measure_generation(clock(tiny.llama()), prompt=12, new=5, batch=2)
    assert (found.ttft, found.tpot) == (12.0, 1.0) and found.tokens_per_s == pytest.approx(10 / 16)
    assert (
        found.cache_bytes == 2 * 2 * 2 * 2 * 16 * (12 + 4) * 4
    )  # rows, layers, K and V, heads, width, tokens, float32
    assert found.peak_bytes is None and "TTFT 12000.0 ms, TPOT 1000.00 ms" in str(found)


def test_bytes_are_those_held(tiny):
    model = tiny.llama(torch.bfloat16)
    wide = measure_generation(model, prompt=40, new=2, repeat=1)
    assert wide.weight_bytes == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    dq.quantize(model, dq.Recipe.load("w4a16").with_(min_features=16), progress=False)
    small = measure_generation(model, prompt=40, new=2, repeat=1, kv_cache="fp8")
    assert small.weight_bytes < wide.weight_bytes and small.cache_bytes < 0.7 * wide.cache_bytes
    assert small.cache == "fp8" and small.ttft > 0 and small.tpot > 0


@torch.no_grad()
def test_tokens_are_those_of_generate(tiny, monkeypatch):
    model, ids, seen = tiny.llama(), torch.arange(3, 15)[None], []
    own = generation._next
    monkeypatch.setattr(generation, "_next", lambda output: (seen.append(own(output)), seen[-1])[1])
    measure_generation(model, prompt=ids, new=6, repeat=1)
    expected = model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False, eos_token_id=None)
    assert torch.equal(torch.cat(seen[-6:], 1), expected[:, 12:])


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        (dict(new=1), "new must be at least 2"),
        (dict(prompt=0), "prompt must be at least 1"),
        (dict(repeat=0), "repeat must be at least 1"),
        (dict(prompt=torch.tensor([[999]])), r"token ids \[B, P\] below 128"),
        (dict(kv_cache="int5"), "int5"),
    ],
)
def test_what_is_refused(tiny, kwargs, match):
    with pytest.raises(dq.DQError, match=match):
        measure_generation(tiny.llama(), **kwargs)
    with pytest.raises(dq.DQError, match="takes a language model"):
        measure_generation(torch.nn.Linear(4, 4))


@pytest.fixture(scope="module")
def talker(tiny, tmp_path_factory):
    """A model folder whose tokenizer has a chat template."""
    path = tmp_path_factory.mktemp("chat")
    model = tiny.llama(torch.bfloat16, vocab_size=64, max_position_embeddings=512)
    dq.quantize(model, dq.Recipe.load("w4a16").with_(min_features=16), progress=False)
    model.save_pretrained(path)
    tokenizer = tiny.t5_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}. {{ m['content'] }}. {% endfor %}"
        "{% if add_generation_prompt %}assistant. {% endif %}"
    )
    tokenizer.save_pretrained(path)
    return path


def test_chat_answers_a_question(talker, capsys):
    argv = ["chat", str(talker), "what is a fox", "--max-new-tokens", "6", "--device", "cpu"]
    assert main(argv) == 0, capsys.readouterr().err
    first = capsys.readouterr().out
    assert main([*argv, "--kv-cache", "int8", "--system", "be brief"]) == 0
    assert first.strip() and "what is a fox" not in first
    assert main(argv) == 0 and capsys.readouterr().out.endswith(first)  # the likeliest tokens: the same answer again


def test_chat_remembers(talker, capsys, monkeypatch):
    """Lines from a pipe; the second question stands behind the first and its answer."""
    seen = []
    from transformers import T5Tokenizer

    own = T5Tokenizer.apply_chat_template

    def watched(self, said, **kwargs):
        seen.append([m["role"] for m in said])
        return own(self, said, **kwargs)

    monkeypatch.setattr(T5Tokenizer, "apply_chat_template", watched)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\nand a dog\n"))
    assert main(["chat", str(talker), "--max-new-tokens", "3", "--device", "cpu"]) == 0, capsys.readouterr().err
    assert seen == [["user"], ["user", "assistant", "user"]]


def test_chat_needs_a_template(tiny, talker, tmp_path, capsys, monkeypatch):
    tiny.t5_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((talker / "config.json").read_text())
    monkeypatch.setattr("dq.pipelines.loading.load", lambda *a: pytest.fail("a model was loaded"))
    assert main(["chat", str(tmp_path), "hello"]) == 2
    assert "has no chat template; dq generate continues a text" in capsys.readouterr().err
    assert main(["chat", str(talker), "hello", "--kv-cache", "int5"]) == 2
    assert main(["chat", str(talker), "hello", "--max-new-tokens", "0"]) == 2
