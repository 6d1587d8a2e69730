"""Learned rotations: the loss falls, the rotations stay orthogonal, and what is fused computes what the model did."""

import pytest
import torch

from dq.qtensor import fake_quantize
from dq.registry import DQError
from dq.rewrites import rewrite
from dq.rewrites.decoder import decoder_structure
from dq.rewrites.spinquant import Rotation, Trainer, check_orthogonal, straight_through, train
from dq.spec import QuantSpec

EXACT = 1e-8


def loud(decoders, kind="Llama", **changes):
    """A decoder whose stream has outlier channels."""
    model = decoders.decoder(kind, **changes)
    model.model.embed_tokens.weight.data[:, [5, 20, 31]] *= 20
    return model


def test_rotations_are_orthogonal_wherever_training_goes():
    start = torch.linalg.qr(torch.randn(24, 24, dtype=torch.float64)).Q
    rotation = Rotation(start)
    torch.testing.assert_close(rotation.matrix(torch.float64), start)
    rotation.free.data.normal_(0, 3)
    assert check_orthogonal(rotation.matrix(torch.float64)) < 1e-10
    assert not torch.allclose(rotation.matrix(torch.float64), start)


def test_what_is_not_orthogonal_is_refused():
    assert check_orthogonal(torch.eye(8)) == 0
    with pytest.raises(DQError, match=r"not orthogonal: \|\|R\^T R - I\|\|"):
        check_orthogonal(torch.eye(8) * (1 + 1e-5))


def test_straight_through():
    """The value of the grid; the gradient of the identity, and for the largest element that of the error's growth."""
    x, g = torch.randn(3, 16, requires_grad=True), torch.arange(16.0)
    y = straight_through(x, QuantSpec.parse("int4/token"))
    (y * g).sum().backward()
    torch.testing.assert_close(y, fake_quantize(x.detach(), QuantSpec.parse("int4/token")))
    expected, rows = g.repeat(3, 1), torch.arange(3)
    top = x.detach().abs().argmax(1)
    growth = ((y - x).detach() * g).sum(1) / x.detach()[rows, top]
    expected[rows, top] += growth
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("spec", ["int4/group16", "nvfp4", "mxfp4", "int8/channel", "fp8_e4m3/channel"])
def test_any_grid_can_be_trained_through(spec):
    x = torch.randn(4, 64, requires_grad=True)
    y = straight_through(x, QuantSpec.parse(spec))
    y.square().sum().backward()
    assert torch.isfinite(x.grad).all()
    torch.testing.assert_close(y, fake_quantize(x.detach(), QuantSpec.parse(spec)))


@pytest.mark.parametrize(
    ("kind", "objective"), [("Llama", "ce"), ("Llama", "kl"), ("Qwen3", "kl"), ("Phi3", "kl"), ("Gemma", "kl")]
)
def test_loss_falls_and_the_function_stays(decoders, kind, objective):
    model = loud(decoders, kind)
    expected = decoders.logits(model)
    params = {"steps": 40, "objective": objective}
    batches = [decoders.tokens(8, 24, seed=1), {"input_ids": decoders.tokens(8, 24, seed=1)}]
    (done,) = rewrite(model, [("spinquant", params)], batches=batches)
    losses = done["loss"]
    assert len(losses) == 40 and sum(losses[-5:]) < sum(losses[:5]) * (0.95 if objective == "kl" else 1)
    assert done["orthogonality"] < 1e-5
    assert decoders.difference(model, expected) < EXACT
    assert all(p.requires_grad for p in model.parameters())


def test_held_out_text_gains_too(decoders):
    """Divergence of the quantized model on other tokens, before and after training."""
    model = loud(decoders)
    rewrite(model, ["norm_fusion"])
    spec = QuantSpec.parse("int4/channel"), QuantSpec.parse("int4/token")
    trainer = Trainer(model, decoder_structure(model), *spec, False, 0)
    model.requires_grad_(False)
    held_out = {"input_ids": decoders.tokens(8, 24, seed=9)}
    before = float(trainer.loss(held_out, "kl").detach())
    train(trainer, [decoders.tokens(8, 24, seed=i) for i in range(4)], 60, 0.1, "kl")
    assert float(trainer.loss(held_out, "kl").detach()) < 0.85 * before


def test_without_rounding_nothing_diverges(decoders):
    """The rotated forward pass is the model itself, R4 included: the divergence starts at zero."""
    model = loud(decoders, tie_word_embeddings=True, attention_bias=True)
    params = {"weights": "", "activations": "", "steps": 1, "objective": "kl", "online": True}
    (done,) = rewrite(model, [("spinquant", params)], batches=[decoders.tokens()])
    assert abs(done["loss"][0]) < 1e-10


def test_failure_leaves_a_sound_model(decoders):
    """A loss that is not finite is an error, hooks are gone and the norms at most are fused."""
    model = loud(decoders)
    expected = decoders.logits(model)
    model.lm_head.register_forward_hook(
        lambda m, a, y: y * (float("nan") if m.training or torch.is_grad_enabled() else 1)
    )
    with pytest.raises(DQError, match="the loss is nan at step 0"):
        rewrite(model, ["spinquant"], batches=[decoders.tokens()])
    assert decoders.difference(model, expected) < EXACT
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_bad_words_are_refused(decoders):
    with pytest.raises(DQError, match="learns from text"):
        rewrite(decoders.decoder(), ["spinquant"])
    for params in ({"objective": "mse"}, {"steps": 0}, {"rate": 0.0}, {"weights": "int5/never"}):
        with pytest.raises(DQError):
            rewrite(decoders.decoder(), [("spinquant", params)], batches=[decoders.tokens()])
