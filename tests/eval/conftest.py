import copy

import pytest
import torch

PROMPTS = ["a red cat", "a blue dog", "the green sun", "a cat and a dog", "red sun"]
KWARGS = {"height": 32, "width": 32, "num_inference_steps": 3, "max_sequence_length": 8, "guidance_scale": 2.0}


def _tokenizer(length):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = sorted({word for prompt in PROMPTS for word in prompt.split()})
    vocab = {"<pad>": 0, "<unk>": 1, "<eos>": 2, **{word: 3 + i for i, word in enumerate(words)}}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=length, **special)


def build_flux(seed=0):
    """A random FluxPipeline with the real classes, 32 x 32 images, a fraction of a second per image."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    torch.manual_seed(seed)
    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    clip = CLIPTextConfig(
        vocab_size=32, hidden_size=32, intermediate_size=37, num_hidden_layers=1, num_attention_heads=2, eos_token_id=2
    )
    t5 = T5Config(vocab_size=32, d_model=32, d_kv=16, d_ff=37, num_layers=1, num_heads=2, is_encoder_decoder=False)
    vae = AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        layers_per_block=1,
        shift_factor=0.0609,
        scaling_factor=1.5035,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae.eval(),
        text_encoder=CLIPTextModel(clip).eval(),
        tokenizer=_tokenizer(16),
        text_encoder_2=T5EncoderModel(t5).eval(),
        tokenizer_2=_tokenizer(16),
        transformer=transformer.eval(),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def with_transformer(pipe, noise=0.0, seed=1):
    """The same pipeline around a copy of its transformer whose weights are off by relative `noise`."""
    transformer = copy.deepcopy(pipe.transformer)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in transformer.parameters():
            std = parameter.std() if parameter.numel() > 1 else parameter.abs().mean()
            parameter.add_(torch.randn(parameter.shape, generator=generator) * std * noise)
    return type(pipe)(**{**pipe.components, "transformer": transformer})


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Tensors here are tiny: with several threads on a busy machine the waiting costs more than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def flux():
    return build_flux()


@pytest.fixture(scope="session")
def altered(flux):
    """altered(noise): a pipeline like `flux` whose transformer is a copy with changed weights."""
    return lambda noise=0.0, seed=1: with_transformer(flux, noise, seed)


@pytest.fixture(scope="session")
def inputs():
    return tuple(PROMPTS), dict(KWARGS)


@pytest.fixture
def prompts(inputs):
    return list(inputs[0])


@pytest.fixture
def call(inputs):
    return dict(inputs[1])
