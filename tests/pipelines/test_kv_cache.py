"""`dq.KVCache`: close to the 16-bit cache, as small as it says, and everything that `generate` does with a cache."""

import copy
import inspect

import pytest
import torch
from transformers import (
    DynamicCache,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import dq
from dq.pipelines.kv_cache import QuantizedKVLayer
from dq.pipelines.kv_store import KV_FORMATS, Affine, Store

ARGUMENT = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"
NAMES = sorted(KV_FORMATS)
LOSSY = [n for n in NAMES if n != "16-bit"]
# Relative error of the logits after 300 cached tokens; bounds about 1.5 times what is measured.
BOUNDS = {
    "fp8": 0.05, "int8": 0.02, "int4": 0.2, "int4-kivi": 0.2, "int2-kivi": 0.8, "int4-quarot": 0.25, "nvfp4": 0.2,
    "nvfp4-rotated": 0.2,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tiny):
    """Head size 64, two key heads for four query heads."""
    return tiny.llama(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)


def ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 128, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def stepped(model, tokens, cache, prompt: int, mask=None) -> torch.Tensor:
    """Logits of the tokens after a prompt, fed one by one."""
    out = []
    for start, end in [(0, prompt), *((i, i + 1) for i in range(prompt, tokens.shape[1]))]:
        part = {} if mask is None else {"attention_mask": mask[:, :end]}
        out.append(model(tokens[:, start:end], **{ARGUMENT: cache}, use_cache=True, **part).logits[:, -1:])
    return torch.cat(out, 1)


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def generate(model, tokens, cache, new: int = 8, **options):
    with torch.no_grad():
        return model.generate(tokens, max_new_tokens=new, min_new_tokens=new, do_sample=False,
                              **{ARGUMENT: cache}, **options)  # fmt: skip


def test_unknown_names(model):
    with pytest.raises(dq.DQError, match="unknown KV cache format 'int4-kivy'; did you mean 'int4-kivi'"):
        dq.KVCache("int4-kivy", config=model.config)
    config = copy.deepcopy(model.config)
    config.head_dim = 44
    with pytest.raises(dq.DQError, match="no Hadamard matrix of size 44"):
        dq.KVCache("int4-quarot", config=config)


def test_a_model_without_keys_and_values():
    """A cache that would hold nothing in few bits says so; the one that rounds nothing is transformers' own."""
    from transformers import MambaConfig

    config = MambaConfig(vocab_size=128, hidden_size=32, state_size=4, num_hidden_layers=2, pad_token_id=0)
    for name in LOSSY:
        with pytest.raises(dq.DQError, match=rf"no layer of mamba holds plain keys and values, so that {name} would"):
            dq.KVCache(name, config=config)
    own, layers = DynamicCache(config=config).layers, dq.KVCache("16-bit", config=config).layers
    assert [type(x) for x in layers] == [type(x) for x in own]


def test_heads_of_different_sizes_by_layer():
    """Gemma 4: sliding layers have smaller heads than the others, and no size that is the model's."""
    import transformers

    kind = getattr(transformers, "Gemma4UnifiedTextConfig", None)
    config = kind and kind(num_hidden_layers=6)
    if not getattr(config, "per_layer_config", None):
        pytest.skip("needs a transformers whose Gemma 4 has sizes by layer")
    sizes = {one.head_dim for one in config.per_layer_config}
    assert len(sizes) == 2
    for name in NAMES:
        cache = dq.KVCache(name, config=config)
        assert cache.is_sliding.count(True) == 5
        for i, one in enumerate(config.per_layer_config):
            x = torch.randn(1, 2, 5, one.head_dim)
            cache.update(x, x, i)
        assert cache.nbytes > 0
    config = kind(num_hidden_layers=6, global_head_dim=44)
    with pytest.raises(dq.DQError, match="no Hadamard matrix of size 44"):
        dq.KVCache("int4-quarot", config=config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_16_bit_is_the_same_bits(model, dtype):
    model = copy.deepcopy(model).to(dtype)
    tokens = ids(2, 40)
    expected = stepped(model, tokens, DynamicCache(config=model.config), 20)
    assert torch.equal(stepped(model, tokens, dq.KVCache("16-bit", config=model.config), 20), expected)
    assert torch.equal(stepped(model, tokens, dq.KVCache("16-bit"), 20), expected)  # layers made as they come
    first = generate(model, tokens, DynamicCache(config=model.config))
    assert torch.equal(generate(model, tokens, dq.KVCache("16-bit", config=model.config)), first)


def test_logits_by_format(model):
    """Over several flushes; the errors fall in the order of the formats."""
    tokens = ids(1, 300)
    expected = stepped(model, tokens, DynamicCache(config=model.config), 150)
    found = {n: error(stepped(model, tokens, dq.KVCache(n, config=model.config), 150), expected) for n in LOSSY}
    assert all(0 < found[n] < BOUNDS[n] for n in LOSSY), found
    assert found["int8"] < found["fp8"] < found["int4"] < found["int2-kivi"], found
    assert found["fp8"] < found["nvfp4"] < found["int2-kivi"], found
    assert found["int4-kivi"] < found["int2-kivi"]


@pytest.mark.parametrize("name", LOSSY)
def test_one_call_that_reads_what_it_stores(model, name):
    """`exact=False`: the logits of one call show what the format costs."""
    tokens = ids(2, 256)
    with torch.no_grad():
        plain = model(tokens).logits
        exact = model(tokens, **{ARGUMENT: dq.KVCache(name, config=model.config)}).logits
        cache = dq.KVCache(name, config=model.config, exact=False)
        stored = model(tokens, **{ARGUMENT: cache}).logits
    assert torch.equal(exact, plain)
    assert 0 < error(stored, plain) < 1.5 * BOUNDS[name]


@pytest.mark.parametrize("name", LOSSY)
def test_generate(model, name):
    tokens = ids(2, 140)
    cache = dq.KVCache(name, config=model.config)
    out = generate(model, tokens, cache)
    assert out.shape == (2, 148) and cache.get_seq_length() == 147
    again = generate(model, tokens, dq.KVCache(name, config=model.config))
    assert torch.equal(out, again)
    # A cache that goes on with a longer prompt: only the new tokens are run.
    more = generate(model, torch.cat([out, ids(2, 3)], 1), cache)
    assert more.shape == (2, 159) and cache.get_seq_length() == 158


@pytest.mark.parametrize("name", NAMES)
def test_samples_do_not_depend_on_their_batch(model, name):
    tokens = ids(3, 200)
    together = stepped(model, tokens, dq.KVCache(name, config=model.config), 196)
    alone = stepped(model, tokens[1:2], dq.KVCache(name, config=model.config), 196)
    assert torch.allclose(together[1:2], alone, atol=1e-4)


@pytest.mark.parametrize("name", LOSSY)
def test_left_padding(model, name):
    """Padding is masked out: the logits stay as close to the 16-bit cache's as without it."""
    tokens, mask = ids(2, 200), torch.ones(2, 200, dtype=torch.long)
    mask[0, :37] = 0
    expected = stepped(model, tokens, DynamicCache(config=model.config), 192, mask)
    found = stepped(model, tokens, dq.KVCache(name, config=model.config), 192, mask)
    assert torch.isfinite(found).all()
    assert max(error(found[i], expected[i]) for i in range(2)) < BOUNDS[name]


def expected_bits(name: str) -> float:
    """Per element at head size 64: codes, then scales."""
    return {
        "16-bit": 16, "fp8": 8 + 16 / 64, "int8": 8 + 32 / 64, "int4": 4 + 32 / 32, "int4-kivi": 5, "int2-kivi": 3,
        "int4-quarot": 4 + 32 / 64, "nvfp4": 4 + 8 / 16 + 32 / 64, "nvfp4-rotated": 5,
    }[name]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_bytes_shrink(model, name):
    """Every tensor held is counted, found by walking the objects, and the sum is what the format promises."""
    model = copy.deepcopy(model).to(torch.bfloat16)
    cache = dq.KVCache(name, config=model.config)
    with torch.no_grad():
        model(ids(2, 384), **{ARGUMENT: cache}, use_cache=True)
    found = {}
    for layer in cache.layers:
        assert layer.keys is None and layer.values is None
        for side in layer.sides:
            for t in [side.recent, *(side.store.parts.values() if side.store else ())]:
                found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    assert sum(found.values()) == cache.nbytes  # no view keeps a larger tensor alive
    elements = 2 * 2 * 2 * 2 * 64  # layers, batch, heads, keys and values, head size
    window = KV_FORMATS[name].window // 2  # of keys nothing is left in the window after 384 = 3 * 128 tokens
    bits = expected_bits(name) * (384 - window) + 16 * window
    assert cache.nbytes * 8 == bits * elements
    assert cache.bits_per_value == pytest.approx(bits / 384)
    cache.reset()
    assert cache.nbytes == 0 and cache.get_seq_length() == 0 and cache.bits_per_value == 0


@pytest.mark.parametrize("name", NAMES)
def test_beams(model, name):
    """Beam search reorders; the kept beams are those that the cache holds."""
    tokens = ids(2, 130)
    out = generate(model, tokens, dq.KVCache(name, config=model.config), num_beams=3, num_return_sequences=2)
    assert out.shape == (4, 138)
    if name == "16-bit":
        same = generate(model, tokens, DynamicCache(config=model.config), num_beams=3, num_return_sequences=2)
        assert torch.equal(out, same)


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_the_batch(model, name):
    cache = dq.KVCache(name, config=model.config)
    tokens = ids(2, 150)
    stepped(model, tokens, cache, 150)
    other = copy.deepcopy(cache)
    other.reorder_cache(torch.tensor([1, 0]))
    last = ids(2, 1, seed=9)
    swapped = stepped(model, last.flip(0), other, 1).flip(0)
    repeated = copy.deepcopy(cache)
    repeated.batch_repeat_interleave(2)
    repeated.batch_select_indices(torch.tensor([0, 3]))
    chosen = stepped(model, last, repeated, 1)
    expected = stepped(model, last, cache, 1)
    assert torch.allclose(swapped, expected, atol=1e-4) and torch.allclose(chosen, expected, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("removed", [1, 45, 149])
def test_crop(model, name, removed):
    """What stays is what was stored; the next tokens land behind it."""
    tokens = ids(1, 170)
    cache = dq.KVCache(name, config=model.config)
    stepped(model, tokens[:, :150], cache, 150)
    cache.crop(-removed)
    assert cache.get_seq_length() == 150 - removed
    assert cache.layers[0].is_croppable == ("kivi" not in name)
    found = stepped(model, tokens[:, 150 - removed :], cache, 10 + removed)
    assert cache.get_seq_length() == 170
    if cache.layers[0].is_croppable:
        fresh = dq.KVCache(name, config=model.config)
        stepped(model, tokens[:, : 150 - removed], fresh, 150 - removed)
        expected = stepped(model, tokens[:, 150 - removed :], fresh, 10 + removed)
        assert torch.allclose(found, expected, atol=1e-3)
    else:
        expected = stepped(model, tokens, DynamicCache(config=model.config), 160)
        assert error(found, expected) < BOUNDS[name]
    cache.crop(3)
    assert cache.get_seq_length() == 3
    cache.crop(-1000)
    assert cache.get_seq_length() == 0 and not any(s.length for s in cache.layers[0].sides)


@pytest.mark.parametrize("name", NAMES)
def test_sliding_window(tiny, name):
    """Old tokens are dropped; the 16-bit kind equals transformers' own sliding cache bit for bit."""
    config = MistralConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=50, max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    model = tiny.seeded(lambda: MistralForCausalLM(config))
    tokens = ids(2, 150)
    cache, own = dq.KVCache(name, config=config), DynamicCache(config=config)
    assert cache.is_sliding == [True, True]
    expected = stepped(model, tokens, own, 40)
    found = stepped(model, tokens, cache, 40)
    assert error(found, expected) < BOUNDS.get(name, 1e-9) * 2
    held = [s.length for layer in cache.layers for s in layer.sides]
    assert max(held) < 49 + 32 and min(held) >= 49
    assert cache.get_mask_sizes(1, 0) == own.get_mask_sizes(1, 0)
    long = stepped(model, tokens, dq.KVCache(name, config=config), 140)  # a prompt longer than the window
    assert error(long, expected[:, -long.shape[1] :]) < BOUNDS.get(name, 1e-6) * 2


def test_sliding_window_rolls_back_when_told(tiny):
    config = MistralConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=50, max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    model = tiny.seeded(lambda: MistralForCausalLM(config))
    tokens = ids(1, 120)
    cache = dq.KVCache("int8", config=config)
    stepped(model, tokens, cache, 100)
    with pytest.raises(dq.DQError, match="activate_past_recording"):
        cache.crop(-5)
    assert cache.get_seq_length() == 120
    cache = dq.KVCache("int8", config=config)
    stepped(model, tokens[:, :100], cache, 100)
    cache.activate_past_recording()
    stepped(model, tokens[:, 100:], cache, 1)
    cache.crop(-5)
    assert cache.get_seq_length() == 115 and cache.layers[0].sides[0].length == 49


def test_assisted_generation(model, tiny):
    """Drafts are rolled back: with an exact cache, the tokens of plain decoding."""
    tokens = ids(1, 30)
    plain = generate(model, tokens, dq.KVCache("16-bit", config=model.config))
    helper = tiny.llama(seed=1, max_position_embeddings=512)
    found = generate(model, tokens, dq.KVCache("16-bit", config=model.config), assistant_model=helper)
    assert torch.equal(plain, found)
    assert generate(model, tokens, dq.KVCache("int8", config=model.config), assistant_model=helper).shape == (1, 38)
    if ARGUMENT == "past_key_values":
        return  # older versions do not ask whether a rollback leaves traces
    with pytest.raises(ValueError, match="cropped"):
        generate(model, tokens, dq.KVCache("int4-kivi", config=model.config), assistant_model=helper)


def test_other_families(tiny):
    config = Qwen3Config(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    model = tiny.seeded(lambda: Qwen3ForCausalLM(config))
    tokens = ids(1, 200)
    expected = stepped(model, tokens, DynamicCache(config=config), 150)
    for name in LOSSY:
        assert error(stepped(model, tokens, dq.KVCache(name, config=config), 150), expected) < BOUNDS[name]


def test_rotation_spreads_an_outlier_channel():
    """What QuaRot is for: one large channel does not take the resolution of the others."""
    x = torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(0))
    x[..., 5] += 40 * torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(1)).sign()
    errors = {}
    for name in ("int4", "int4-quarot", "nvfp4", "nvfp4-rotated"):
        layer = QuantizedKVLayer(KV_FORMATS[name])
        layer.update(x, x)
        back, _ = layer.update(x[..., :0, :], x[..., :0, :])
        small = [i for i in range(64) if i // 32 == 0 and i != 5]
        errors[name] = (back - x)[..., small].pow(2).mean().item()
    assert errors["int4-quarot"] < 0.5 * errors["int4"], errors


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("bits", [2, 4])
def test_affine_by_hand(bits, channels):
    """Codes, 16-bit scales and minima as the formula says."""
    x = torch.randn(1, 1, 32, 32, generator=torch.Generator().manual_seed(0)).to(torch.float16) + 7
    store = Store(Affine(bits, 32), channels)
    store.append(x)
    groups = (x.mT if channels else x)[0, 0].float()
    low = groups.amin(1, keepdim=True)
    scale = ((groups.amax(1, keepdim=True) - low) / (2**bits - 1)).half().float()
    expected = torch.round((groups - low) / scale).clamp(0, 2**bits - 1) * scale + low
    found = store.read()[0, 0]
    assert torch.equal(found.mT if channels else found, expected)
    assert store.parts["codes"].numel() == 32 * 32 * bits // 8


def test_constant_and_tiny_groups():
    for value in (0.0, 3.25, -1e-20):
        x = torch.full((1, 1, 32, 32), value)
        store = Store(Affine(2, 32), True)
        store.append(x)
        assert torch.allclose(store.read(), x, rtol=2**-8)


def test_head_size_that_no_group_divides():
    """40 = 32 + 8: the last group is short."""
    x = torch.randn(1, 2, 10, 40, generator=torch.Generator().manual_seed(0))
    for name in LOSSY:
        layer = QuantizedKVLayer(KV_FORMATS[name])
        layer.update(x, x)
        back, _ = layer.update(x[..., :0, :], x[..., :0, :])
        assert back.shape == x.shape and error(back, x) < 0.2
