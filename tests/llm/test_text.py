"""`dq.Text`: windows of tokens as calibration; what it refuses, and what the artifact says about it."""

import pytest
import torch
from transformers import BatchEncoding

import dq
from dq.tokens import windows


@pytest.fixture
def text(llm):
    """text(...) -> dq.Text over the text of this folder."""

    def make(value=llm.text, tokenizer=None, **kwargs):
        return dq.Text(value, tokenizer or llm.tokenizer(), **dict(samples=4, length=32) | kwargs)

    return make


def test_windows_are_drawn_from_the_text_and_repeat(text, llm):
    a, b, other = text(), text(), text(seed=1)
    assert a.ids.shape == (4, 32) and a.ids.dtype == torch.int64 and torch.equal(a.ids, b.ids)
    assert not torch.equal(a.ids, other.ids) and a.describe() == b.describe() != other.describe()
    all_windows = windows(torch.tensor(llm.tokenizer()(llm.text)["input_ids"]), 32)
    assert all(any(torch.equal(row, w) for w in all_windows) for row in a.ids)
    assert repr(a) == "Text(4 windows of 32 tokens)" and repr(dq.Prompts(["a"])) == "Prompts(1 prompts, 64 records)"


def test_texts_follow_each_other(text):
    joined, listed = text("abcd" * 40, samples=5), text(["abcd"] * 40, samples=5)
    assert torch.equal(joined.ids, listed.ids) and joined.describe()["sha256"] != listed.describe()["sha256"]


def test_a_start_token_stands_in_front_of_every_window(text, llm):
    with pytest.warns(UserWarning, match="fills 8 windows of 16 tokens, not 200: all are used"):
        found = text("abcdefghijkl" * 10, tokenizer=llm.tokenizer(start=True), samples=200, length=16)
    assert found.ids.shape == (8, 16) and (found.ids[:, 0] == 1).all() and not (found.ids[:, 1:] == 1).any()
    assert found.describe()["start"] == 1


def test_what_a_tokenizer_returns_is_a_record(llm):
    """A BatchEncoding is no dict, but keyword arguments all the same; texts by themselves are told where to go."""
    ids = torch.tensor([llm.tokenizer()("abcdefgh" * 8)["input_ids"]])
    found, recipe = BatchEncoding({"input_ids": ids}), dq.Recipe.load("int8-smooth")
    models = [llm.decoder() for _ in range(2)]
    for model, record in zip(models, (found, dict(found)), strict=True):
        dq.quantize(model, recipe.with_(min_features=16), calibration=[record], progress=False)
    assert torch.equal(models[0](**found).logits, models[1](**found).logits)
    for calibration, match in (
        (found, "wrap the BatchEncoding in a list"),
        (["a text"], r"got str; texts go into dq\.Text\(\[\.\.\.\], tokenizer\)"),
        ("calib.txt", r"got str \(of a file: dq\.Text\.from_file"),
    ):
        with pytest.raises(dq.DQError, match=match):
            dq.quantize(llm.decoder(), recipe.with_(min_features=16), calibration=calibration)


def test_files(llm, tmp_path, text):
    path = tmp_path / "calib.txt"
    path.write_text("\ufeff" + llm.text, encoding="utf-8")
    found = dq.Text.from_file(path, llm.tokenizer(), samples=4, length=32, seed=0)
    assert torch.equal(found.ids, text().ids)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"\xff\xfe\xff", "no UTF-8"),
        (b"a\0b", "binary"),
        (None, "cannot read"),
    ],
)
def test_unreadable_files(llm, tmp_path, content, match):
    path = tmp_path / "calib.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(dq.DQError, match=match):
        dq.Text.from_file(path, llm.tokenizer())


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        (dict(value=[]), "got no text"),
        (dict(value=""), "calibration text is empty"),
        (dict(value=[" ", "\n"]), "calibration text is empty"),
        (dict(value=[3]), "must be texts"),
        (dict(value="short"), "has 5 tokens, one window needs 32: give more text or a smaller length"),
        (dict(tokenizer=7), "needs the model's tokenizer .*, got int"),
        (dict(tokenizer=lambda text, **k: None), "is no tokenizer of texts"),
        (dict(samples=0), "samples must be at least 1"),
        (dict(length=1), "length must be at least 2"),
        (dict(length=2.5), "length must be a whole number"),
        (dict(seed=-1), "seed must be at least 0"),
    ],
)
def test_what_is_refused(text, kwargs, match):
    with pytest.raises(dq.DQError, match=match):
        text(**kwargs)


def test_no_tokenizer(llm):
    with pytest.raises(dq.DQError, match=r"needs the model's tokenizer .*, got None"):
        dq.Text(llm.text, None)


def test_calibration_of_a_model(text, llm, tiny):
    """The same weights as from records written by hand, and an artifact that says what it was calibrated on."""
    calibration = text()
    model, twin = llm.decoder(), llm.decoder()
    recipe = tiny.recipe("w4a16-gptq")
    report = dq.quantize(model, recipe, calibration=calibration, progress=False)
    dq.quantize(twin, recipe, calibration=[dict(input_ids=row[None]) for row in calibration.ids], progress=False)
    assert torch.equal(model(calibration.ids).logits, twin(calibration.ids).logits)
    said = report.calibration
    assert said["samples"] == 4 and said["length"] == 32 and len(said["sha256"]) == len(said["records_sha256"]) == 64
    assert model.dq_artifact["calibration"] == said


def test_refused_by_models(text, llm, tiny):
    with pytest.raises(dq.DQError, match=r"token .* is beyond the 16 of LlamaForCausalLM"):
        dq.quantize(llm.decoder(vocab_size=16), tiny.recipe("w4a16-gptq"), calibration=text(), progress=False)
    with pytest.raises(dq.DQError, match="takes no input_ids"):
        dq.quantize(tiny.flux(), tiny.recipe("w4a16-gptq"), calibration=text(), progress=False)
    with pytest.raises(dq.DQError, match=r"a language model takes dq\.Text"):
        dq.quantize(llm.decoder(), tiny.recipe("w4a16-gptq"), calibration=dq.Prompts(["a"]), progress=False)


def test_data_free_recipes_say_so(text, llm, tiny):
    with pytest.warns(UserWarning, match="needs no calibration"):
        dq.quantize(llm.decoder(), tiny.recipe("fp8"), calibration=text(), progress=False)


def test_text_encoders_of_pipelines(text, tiny):
    """By themselves from text, or while the pipeline runs on prompts."""
    pipe = tiny.flux_pipeline()
    with pytest.raises(dq.DQError, match=r"dq\.Text can calibrate one model at a time"):
        dq.quantize(
            pipe, tiny.recipe("w4a16-gptq"), components=["transformer", "text_encoder_2"], calibration=text(),
            progress=False,
        )  # fmt: skip
    report = dq.quantize(
        pipe, tiny.recipe("w4a16-gptq"), components=["text_encoder_2"], calibration=text(), progress=False
    )
    assert report.layers and all(x.sqnr_db > 10 for x in report.layers)
    assert type(pipe.transformer.proj_out) is torch.nn.Linear
