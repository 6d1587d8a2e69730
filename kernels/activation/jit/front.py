"""What stands in front of a quantized linear in a transformer block, computed in float32 on a row's tiles [C, 8].

rmsnorm     x / sqrt(mean x^2 + eps) * weight
layernorm   (x - mean) / sqrt(var + eps) * weight + bias, then adaLN: * (1 + scale) + shift
gelu        x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), the tanh form of GELU
silu        x * sigmoid(x)
Either of the last two times `gate`, a second input: SwiGLU, GEGLU.
"""

import triton
import triton.language as tl


@triton.jit
def activation(x, KIND: tl.constexpr):
    """GELU (tanh form) or SiLU; where the exponential overflows, x / inf is the right limit."""
    u = x
    if KIND == "gelu":
        u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-u))


@triton.jit
def mean(tiles, K: tl.constexpr, TILES: tl.constexpr):
    """Mean of a row; masked places hold 0."""
    total = 0.0
    for t in tl.static_range(TILES):
        total += tl.sum(tl.sum(tiles[t], axis=1), axis=0)
    return total / K


@triton.jit
def inverse_deviation(tiles, at, middle, eps, K: tl.constexpr, TILES: tl.constexpr):
    """1 / sqrt(mean (x - middle)^2 + eps): of the values themselves, since E[x^2] - E[x]^2 cancels."""
    total = 0.0
    for t in tl.static_range(TILES):
        delta = tl.where(at[t] < K, tiles[t] - middle, 0.0)
        total += tl.sum(tl.sum(delta * delta, axis=1), axis=0)
    return tl.rsqrt(total / K + eps)
