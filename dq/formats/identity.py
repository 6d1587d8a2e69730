"""BF16 and FP16: nothing is scaled, values are only cast (half to even); FP16 saturates at 65504, no Inf."""

import torch
from torch import Tensor

from dq.spec import FORMATS, Format


def _register(name: str, dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max

    def encode(x: Tensor) -> Tensor:
        return x.clamp(-top, top).to(dtype)

    def decode(codes: Tensor) -> Tensor:
        return codes.to(torch.float32)

    def round_(x: Tensor) -> Tensor:
        return decode(encode(x))

    FORMATS.register(Format(name, 16, top, -top, dtype, encode, decode, round_, identity=True))


_register("bf16", torch.bfloat16)
_register("fp16", torch.float16)
