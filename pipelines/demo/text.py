"""Tokenizers of the demo, trained on its prompts: a Unigram one for T5 and a byte-level BPE one for CLIP."""

from __future__ import annotations

import json
import os

from .models import TEXT_TOKENS

BOS, EOS = "<|startoftext|>", "<|endoftext|>"


def _train_t5(corpus: list[str], vocab: int):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import T5Tokenizer

    draft = Tokenizer(models.Unigram())
    draft.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")]
    )
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=vocab, special_tokens=special, unk_token="<unk>", show_progress=False)
    draft.train_from_iterator(corpus, trainer)
    pieces = [tuple(p) for p in json.loads(draft.to_str())["model"]["vocab"]]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=TEXT_TOKENS)


def _train_clip(corpus: list[str], vocab: int):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import CLIPTokenizer

    blank = CLIPTokenizer().backend_tokenizer  # the splitting rules of CLIP itself
    draft = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    draft.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    draft.pre_tokenizer = blank.pre_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - 2, end_of_word_suffix="</w>", initial_alphabet=alphabet, show_progress=False
    )
    draft.train_from_iterator(corpus, trainer)
    model = json.loads(draft.to_str())["model"]
    merges = [tuple(m) for m in model["merges"]]
    # every byte also as the end of a word: nothing a user types becomes an unknown token
    order = alphabet + [a + "</w>" for a in alphabet] + ["".join(m) for m in merges]
    ids = {token: i for i, token in enumerate(dict.fromkeys([*order, BOS, EOS]))}
    return CLIPTokenizer(vocab=ids, merges=merges, model_max_length=TEXT_TOKENS)


def train_tokenizers(texts: list[list[str]], clip_vocab: int, t5_vocab: int, out: str):
    """Trains both on all prompts and saves them as `out/tokenizer` (CLIP) and `out/tokenizer_2` (T5)."""
    corpus = sorted(t for row in texts for t in row)
    t5 = _train_t5(corpus, t5_vocab)
    clip = _train_clip(corpus, clip_vocab)
    t5.save_pretrained(os.path.join(out, "tokenizer_2"))
    clip.save_pretrained(os.path.join(out, "tokenizer"))
    clip.backend_tokenizer.model.save(os.path.join(out, "tokenizer"))  # vocab.json and merges.txt
    return clip, t5


def load_tokenizers(folder: str):
    """(CLIPTokenizer, T5Tokenizer) from `folder/tokenizer` and `folder/tokenizer_2`."""
    from transformers import CLIPTokenizer, T5Tokenizer

    clip = CLIPTokenizer.from_pretrained(os.path.join(folder, "tokenizer"))
    return clip, T5Tokenizer.from_pretrained(os.path.join(folder, "tokenizer_2"))


def encode(tokenizer, texts: list[str]):
    """int64 [len(texts), TEXT_TOKENS], padded and cut exactly as FluxPipeline does."""
    return tokenizer(
        texts, padding="max_length", max_length=TEXT_TOKENS, truncation=True, return_tensors="pt"
    ).input_ids
