"""Likelihood tasks through lm-evaluation-harness itself, on a task file made here; and without it, one clear line."""

import json
import math
import sys

import pytest
import torch

import dq
from dq.cli import main
from dq.eval.tasks import _differences, evaluate_tasks

QUESTIONS = [("the quick ", ["brown fox", "lazy dog", "box"], i % 3) for i in range(6)]
QUESTIONS += [(f"pack my {c}", ["jugs", "old man", "five"], i % 3) for i, c in enumerate("abcdef")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A task of twelve questions with three answers each."""
    pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness, see the extra tasks")
    path = tmp_path_factory.mktemp("tasks")
    lines = [json.dumps({"question": q, "choices": c, "answer": a}) for q, c, a in QUESTIONS]
    (path / "toy.jsonl").write_text("\n".join(lines) + "\n")
    (path / "toy.yaml").write_text(
        f"task: dq_toy\ndataset_path: json\ndataset_kwargs:\n  data_files: {{validation: {path}/toy.jsonl}}\n"
        "validation_split: validation\noutput_type: multiple_choice\ndoc_to_text: '{{question}}'\n"
        "doc_to_choice: '{{choices}}'\ndoc_to_target: answer\ntarget_delimiter: ''\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    return path


@pytest.fixture(scope="module")
def pair(tiny):
    """A model, and one that is quantized so coarsely that it answers otherwise."""
    reference, other = tiny.llama(vocab_size=64), tiny.llama(vocab_size=64)
    dq.quantize(other, dq.Recipe.load("w4a4-int4").with_(min_features=16), progress=False)
    with torch.no_grad():
        other.lm_head.weight.add_(torch.randn(64, 64, generator=torch.Generator().manual_seed(1)), alpha=0.3)
    return reference, other


@torch.no_grad()
def by_hand(model, tokenizer):
    """1 for each question whose right answer has the largest sum of log probabilities."""
    out = []
    for question, choices, answer in QUESTIONS:
        start = tokenizer(question.rstrip(), add_special_tokens=False)["input_ids"]
        sums = []
        for choice in choices:
            whole = tokenizer(question.rstrip() + question[len(question.rstrip()) :] + choice, add_special_tokens=False)
            ids = torch.tensor(whole["input_ids"])
            logs = model(ids[None]).logits[0].log_softmax(-1)
            sums.append(float(sum(logs[i - 1, ids[i]] for i in range(len(start), len(ids)))))
        out.append(float(max(range(3), key=sums.__getitem__) == answer))
    return out


def test_scores_are_those_of_the_likelihoods(folder, pair, tiny):
    tokenizer, (reference, other) = tiny.t5_tokenizer(), pair
    result = evaluate_tasks(other, ["dq_toy"], tokenizer, reference=reference, folder=folder, batch=4)
    base, mine = by_hand(reference, tokenizer), by_hand(other, tokenizer)
    assert base != mine  # or nothing here could fail
    assert result["reference"]["acc[dq_toy]"].value == pytest.approx(sum(base) / 12)
    found = result["candidate"]
    assert found["acc[dq_toy]"].value == pytest.approx(sum(mine) / 12) and found["acc[dq_toy]"].tokens == 12
    gaps = torch.tensor(mine) - torch.tensor(base)
    assert found["acc-diff[dq_toy]"].value == pytest.approx(float(gaps.mean()))
    assert found["acc-diff[dq_toy]"].se == pytest.approx(float(gaps.std()) / math.sqrt(12))
    assert evaluate_tasks(other, "dq_toy", tokenizer, folder=folder, limit=5)["candidate"]["acc[dq_toy]"].tokens == 5


def test_unknown_tasks_are_refused(folder, pair, tiny):
    with pytest.raises(dq.DQError, match=r"lm_eval knows no task 'dq_tyo'; did you mean 'dq_toy'"):
        evaluate_tasks(pair[1], ["dq_tyo"], tiny.t5_tokenizer(), folder=folder)
    with pytest.raises(dq.DQError, match="candidate is the reference itself"):
        evaluate_tasks(pair[0], ["dq_toy"], tiny.t5_tokenizer(), reference=pair[0], folder=folder)


def test_the_command(folder, tiny, tmp_path, capsys):
    model = tiny.llama(torch.bfloat16, vocab_size=64)
    model.save_pretrained(tmp_path / "a")
    tiny.t5_tokenizer().save_pretrained(tmp_path / "a")
    dq.quantize(model, dq.Recipe.load("int8").with_(min_features=16), progress=False)
    model.save_pretrained(tmp_path / "b")
    where = [str(tmp_path / "b"), "--reference", str(tmp_path / "a"), "--device", "cpu"]
    more = ["--tasks", "dq_toy", "--task-folder", str(folder), "--speed", "--out", str(tmp_path / "x.json")]
    assert main(["eval", *where, *more]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "acc-diff[dq_toy]" in said and "ttft[ms]" in said
    saved = json.loads((tmp_path / "x.json").read_text())["scores"][str(tmp_path / "b")]
    assert {"acc[dq_toy]", "acc-diff[dq_toy]", "tokens/s"} <= set(saved)


def test_without_the_harness(tiny, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(dq.DQError, match="not installed: pip install lm_eval"):
        evaluate_tasks(tiny.llama(), ["hellaswag"], tiny.t5_tokenizer())
    monkeypatch.setattr("dq.pipelines.loading.load", lambda *a: pytest.fail("a model was loaded"))
    assert main(["eval", str(tmp_path), "--reference", str(tmp_path), "--tasks", "hellaswag"]) == 2
    assert "pip install lm_eval" in capsys.readouterr().err


def test_paired_differences():
    """Only samples that both have, and the textbook standard error."""
    mine = {"t": {"acc": {0: 1.0, 1: 0.0, 2: 1.0, 9: 1.0}, "new": {0: 1.0}}}
    base = {"t": {"acc": {0: 1.0, 1: 1.0, 2: 0.0, 3: 0.0}}}
    (found,) = _differences(mine, base).values()
    gaps = torch.tensor([0.0, -1.0, 1.0])
    assert found.value == 0 and found.tokens == 3 and found.se == pytest.approx(float(gaps.std()) / math.sqrt(3))
