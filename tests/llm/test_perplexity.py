"""Perplexity, KL and agreement against numbers computed another way; protocols; standard errors; what is refused."""

import json
import math

import pytest
import torch

import dq
from dq.eval.bench import llm as bench
from dq.eval.perplexity import _mean, bits


@pytest.fixture(scope="module")
def pair(llm):
    """A model, and one that is near it."""
    reference, other = llm.decoder(), llm.decoder()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.05 * p.abs().mean() * torch.randn(p.shape, generator=torch.Generator().manual_seed(3)))
    return reference, other


def evaluate(llm, candidate, reference, tokenizer=None, **kwargs):
    tokenizer = tokenizer or llm.tokenizer()
    return dq.evaluate_text(candidate, reference, llm.text, tokenizer, **dict(length=32, progress=False) | kwargs)


@torch.no_grad()
def by_hand(llm, model, reference, spans, length=32):
    """Sums over spans (window start, first scored place) with torch's own losses."""
    ids = torch.tensor(llm.tokenizer()(llm.text)["input_ids"])
    nll, kl, same, count = 0.0, 0.0, 0, 0
    for begin, first in spans:
        window = ids[begin : begin + length]
        q, p = (m(window[None]).logits[0, first - 1 : -1].double() for m in (model, reference))
        nll += float(torch.nn.functional.cross_entropy(q, window[first:], reduction="sum"))
        kl += float(torch.nn.functional.kl_div(q.log_softmax(-1), p.softmax(-1), reduction="sum"))
        same += int((q.argmax(-1) == p.argmax(-1)).sum())
        count += length - first
    return math.exp(nll / count), kl / count, same / count, count


def test_non_overlapping_windows(llm, pair):
    reference, other = pair
    result = evaluate(llm, other, reference, limit=5)
    ppl, kl, same, count = by_hand(llm, other, reference, [(32 * i, 1) for i in range(5)])
    found = result["candidate"]
    assert count == 5 * 31 == found["ppl[32]"].tokens == result.settings["scored_tokens"]
    assert found["ppl[32]"].value == pytest.approx(ppl, rel=1e-5)
    assert found["kl[32]"].value == pytest.approx(kl, rel=1e-3) and found["kl[32]"].value > 0
    assert found["top1[32]"].value == pytest.approx(same)
    ratio = math.log(found["ppl[32]"].value / result["reference"]["ppl[32]"].value)
    assert found["nll-diff[32]"].value == pytest.approx(ratio, abs=1e-5)


def test_sliding_windows(llm, pair):
    """Every token after the first is scored once, with at least L - S tokens before it."""
    reference, other = pair
    result = evaluate(llm, other, reference, stride=8, limit=6)
    ppl, kl, same, count = by_hand(llm, other, reference, [(8 * i, 1 if i == 0 else 24) for i in range(6)])
    found = result["candidate"]
    assert found["ppl[32/8]"].value == pytest.approx(ppl, rel=1e-5) and found["ppl[32/8]"].tokens == count == 31 + 5 * 8
    assert found["kl[32/8]"].value == pytest.approx(kl, rel=1e-3) and found["top1[32/8]"].value == pytest.approx(same)


def test_start_tokens_are_part_of_the_protocol(llm, pair):
    result = evaluate(llm, pair[1], pair[0], llm.tokenizer(start=True), limit=4)
    assert result.settings["protocol"] == "32+bos" and result.settings["scored_tokens"] == 4 * 31
    again = evaluate(llm, pair[1], pair[0], llm.tokenizer(start=True), stride=8, limit=4)
    assert again.settings["protocol"] == "32/8+bos" and again.settings["scored_tokens"] == 31 + 3 * 8


def test_a_copy_is_the_reference(llm, pair):
    found = evaluate(llm, llm.decoder(), pair[0], limit=3)["candidate"]
    assert found["kl[32]"].value == 0 and found["top1[32]"].value == 1 and found["nll-diff[32]"].value == 0


def test_standard_error_is_that_of_a_ratio():
    """For windows of equal length: that of the mean of their means; and the true spread of such means."""
    values = torch.randn(40, generator=torch.Generator().manual_seed(0)).double()
    score = _mean((values * 7).tolist(), [7] * 40)
    assert score.value == pytest.approx(float(values.mean())) and score.tokens == 280
    assert score.se == pytest.approx(float(values.std() / math.sqrt(40)))
    assert _mean([3.0], [2]).se is None


def test_perplexity_alone(llm, pair):
    result = evaluate(llm, {"a": pair[0]}, None, limit=2)
    assert list(result.scores) == ["a"] and list(result["a"]) == ["ppl[32]"]


def test_candidates_open_in_turn_and_results_are_json(llm, pair, tmp_path):
    opened = []

    def make(name):
        opened.append(name)
        return pair[1]

    result = evaluate(llm, {"a": lambda: make("a"), "b": lambda: make("b")}, pair[0], limit=2)
    assert opened == ["a", "b"] and result["a"] == result["b"]
    saved = json.loads(result.save(tmp_path / "x.json").read_text())
    assert saved["scores"]["a"]["kl[32]"]["value"] == result["a"]["kl[32]"].value
    lines = result.table().splitlines()
    assert lines[0].split() == ["candidate", "ppl[32]", "nll-diff[32]", "kl[32]", "top1[32]"] and len(lines) == 4
    with pytest.raises(dq.DQError, match="no candidate 'c'"):
        result["c"]


def test_without_room_the_reference_runs_again(llm, pair, monkeypatch):
    expected = evaluate(llm, pair[1], pair[0], limit=3)
    monkeypatch.setattr("dq.eval.perplexity.CACHE_BYTES", 0)
    assert evaluate(llm, pair[1], pair[0], limit=3).scores == expected.scores


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        (dict(length=1), "length must be at least 2"),
        (dict(stride=0), "stride must be at least 1 and at most 32"),
        (dict(stride=33), "stride must be at least 1 and at most 32"),
        (dict(limit=0), "limit must be at least 1"),
        (dict(length=10**6), "one window needs 1000000"),
        (dict(tokenizer=5), "needs the model's tokenizer"),
    ],
)
def test_what_is_refused(llm, pair, kwargs, match):
    with pytest.raises(dq.DQError, match=match):
        evaluate(llm, pair[1], pair[0], **kwargs)


def test_models_that_are_refused(llm, pair):
    with pytest.raises(dq.DQError, match="candidate is the reference itself"):
        evaluate(llm, pair[0], pair[0])
    with pytest.raises(dq.DQError, match="candidate is no model but a str"):
        evaluate(llm, "folder", pair[0])
    with pytest.raises(dq.DQError, match="none of them called 'reference'"):
        evaluate(llm, {"reference": pair[1]}, pair[0])
    with pytest.raises(dq.DQError, match="beyond the 16 of"):
        evaluate(llm, llm.decoder(vocab_size=16), None)
    with pytest.raises(dq.DQError, match="reference predicts 200 tokens, candidate 128"):
        evaluate(llm, pair[1], llm.decoder(vocab_size=200))
    with pytest.raises(dq.DQError, match=r"windows of 32 tokens are longer than the 16 positions.*length=16"):
        evaluate(llm, llm.decoder(max_position_embeddings=16), None)
    broken = llm.decoder()
    broken.lm_head.weight.data[5] = float("nan")
    with pytest.raises(dq.DQError, match="candidate gave NaN or Inf in window 0"):
        evaluate(llm, broken, pair[0])


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_copy_off_the_lattice_is_the_same_function(llm, kind, tied):
    model = llm.decoder(kind, tie_word_embeddings=tied)
    ids = torch.randint(3, 100, (2, 16))
    with torch.no_grad():
        expected = model(ids).logits
        before = {n: p.clone() for n, p in model.named_parameters()}
        bench.scramble(model)
        assert float((model(ids).logits - expected).abs().max() / expected.abs().max()) < 1e-4
    for name in ("self_attn.o_proj", "mlp.down_proj", "mlp.gate_proj"):
        assert not torch.allclose(model.get_parameter(f"model.layers.0.{name}.weight"),
                                  before[f"model.layers.0.{name}.weight"])  # fmt: skip
    with pytest.raises(dq.DQError, match=r"give a Structure|is no linear"):
        bench.scramble(llm.decoder("Phi3"))


def test_stored_bits(llm, tiny):
    model = llm.decoder()
    assert bits(model) is None
    dq.quantize(model, tiny.recipe("int8"), progress=False)
    n = [(x.out_features, x.in_features) for x in model.modules() if isinstance(x, dq.QuantizedLinear)]
    assert bits(model) == pytest.approx(sum(8 * a * b + 32 * a for a, b in n) / sum(a * b for a, b in n))


@torch.no_grad()
def test_windows_in_batches_score_the_same(llm, pair):
    """Also where the last batch is not full; and NaN names its window."""
    from dq.eval.perplexity import TextScorer
    from dq.registry import DQError

    reference, other = pair
    one, three = (TextScorer(reference, llm.text, llm.tokenizer(), length=32, limit=7, batch=b) for b in (1, 3))
    a, b = one.reference_scores(), three.reference_scores()
    assert a["ppl[32]"].value == pytest.approx(b["ppl[32]"].value, rel=1e-5)
    a, b = one.score(other), three.score(other)
    for key, score in a.items():
        assert b[key].tokens == score.tokens == 7 * 31
        assert b[key].value == pytest.approx(score.value, rel=1e-4, abs=1e-6)
        assert b[key].se == pytest.approx(score.se, rel=1e-3, abs=1e-6)
    seen = []

    class Broken(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = other

        def get_input_embeddings(self):
            return other.get_input_embeddings()

        def forward(self, input_ids, use_cache):
            seen.append(len(input_ids))
            out = self.model(input_ids=input_ids)
            if len(seen) == 2:
                out.logits[1, 3, 5] = float("nan")
            return out

    with pytest.raises(DQError, match="window 4"):
        three.score(Broken())
    assert seen == [3, 3]


def test_a_cache_counts_one_sequence(llm):
    """Bytes of a batch of equal windows are those of one, times its size."""
    from dq.pipelines.kv_cache import KVCache, cache_argument

    model = llm.decoder()
    make = lambda: KVCache("int8", model.config, exact=False)  # noqa: E731
    costs = []
    for size in (1, 3):
        cached = bench.Cached(model, make, cache_argument(model))
        cached(torch.arange(3, 19)[None].repeat(size, 1))
        costs.append(bench.cache_cost(cached.last, cached.sequences))
    assert costs[0] == costs[1]
