"""Convolutions as linears: `QuantizedConv2d`, and the matrix view that planning, calibration and rounding have of both.

A convolution with kernel kh x kw is a linear of K = C kh kw inputs on every output position:
`y[b, :, p] = W.reshape(N, K) @ patch(x, b, p) + bias`, patches in the order of `torch.nn.functional.unfold`. So every
grid, scale per token (here: per output position), rounding, transform and kernel of linears serves it.
Source: the lowering of im2col (Chellapilla et al. 2006); 8 bits for UNet convolutions after Q-Diffusion
(arXiv 2302.04304).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dq.linear import QuantizedLinear

_GEOMETRY = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
_GEOMETRY += ("transposed", "output_padding", "_reversed_padding_repeated_twice")


def size(module: nn.Module) -> tuple[int, int]:
    """(N, K) of the matrix that a linear or a convolution multiplies by."""
    if not isinstance(module, nn.Conv2d):
        return module.out_features, module.in_features
    kh, kw = module.kernel_size
    return module.out_channels, module.in_channels // module.groups * kh * kw


def matrix(module: nn.Module) -> Tensor:
    """That matrix [N, K]: the weight, of a convolution as a view."""
    return module.weight.flatten(1)


def rows(module: nn.Module, x: Tensor) -> Tensor:
    """What the matrix is multiplied with: x [..., K] of a linear as it is; of a convolution the patches
    [batch, positions, K] of x [batch, C, H, W] (or [positions, K] of [C, H, W])."""
    if not isinstance(module, nn.Conv2d):
        return x
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    around = module._reversed_padding_repeated_twice
    x = F.pad(x, around, mode=mode) if any(around) else x
    if set(module.kernel_size) == {1}:
        sh, sw = module.stride
        return x[..., ::sh, ::sw].flatten(-2).transpose(-1, -2)
    return F.unfold(x, module.kernel_size, module.dilation, 0, module.stride).transpose(-1, -2)


def like(layer: nn.Module, old: nn.Module) -> nn.Module:
    """A quantized layer in the form of the one that it replaces: a convolution's gets its geometry."""
    if isinstance(old, nn.Conv2d) and type(layer) is QuantizedLinear:
        layer.__class__ = QuantizedConv2d
        for name in _GEOMETRY:
            setattr(layer, name, getattr(old, name))
    return layer


def plain(layer: QuantizedLinear) -> nn.Module:
    """A 16-bit module of the same kind and geometry on the meta device, to be given weight and bias."""
    if not isinstance(layer, QuantizedConv2d):
        return nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    named = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    return nn.Conv2d(**{n: getattr(layer, n) for n in named}, bias=layer.bias is not None, device="meta")


class QuantizedConv2d(QuantizedLinear, nn.Conv2d):
    """`y = Q_X(patches(x)) @ Q_W(W)^T + b`, reshaped to [batch, N, H', W']; made by `like` from a `QuantizedLinear`.

    Its `in_features` is K = C kh kw; `.weight` reports the shape [N, C, kh, kw]. Groups are 1.
    """

    @property
    def weight(self) -> Tensor:
        flat = super().weight
        weight = flat.as_strided((self.out_channels, self.in_channels, *self.kernel_size), (0, 0, 0, 0))
        for name, value in self.weight_marks.items():
            setattr(weight, name, value)
        return weight

    def forward(self, input: Tensor) -> Tensor:
        """input [batch, C, H, W] (or [C, H, W]) -> [batch, N, H', W'] in its dtype."""
        y = super().forward(rows(self, input)).transpose(-1, -2)
        return y.reshape(*y.shape[:-1], *self.positions(*input.shape[-2:])).contiguous()

    def positions(self, height: int, width: int) -> tuple[int, int]:
        """(H', W') for an input of height x width."""
        around = self._reversed_padding_repeated_twice
        padded = (height + around[2] + around[3], width + around[0] + around[1])
        geometry = zip(padded, self.kernel_size, self.dilation, self.stride, strict=True)
        return tuple((s - d * (k - 1) - 1) // step + 1 for s, k, d, step in geometry)

    def extra_repr(self) -> str:
        geometry = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        return f"{geometry}, {super().extra_repr().partition(', weights')[2].join(('weights', ''))}"
