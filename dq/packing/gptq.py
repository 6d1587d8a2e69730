"""GPTQ's int32 tensors: codes packed along K, zero points along N, both stored with K first.

32 codes of 3 bits fill three words; codes 10 and 21 straddle two. Tools agree on no layout for 5, 6 and 7 bits.
"""

from dq.packing import PACKINGS
from dq.packing.dense import word_packing

for _b in (2, 3, 4, 8):
    _text = f"qweight int32 [ceil(K*{_b}/32), N]: code of the unsigned grid, dense along K, lowest bits first"
    PACKINGS.register(word_packing(f"gptq-int{_b}", _text, "AutoGPTQ, GPTQModel", _b, after=True))
    # `gptq` stores z - 1, and its readers add the 1 after masking: 2^b can be stored, 0 cannot (AutoGPTQ's own writer
    # lets it spill into the other zero points of the word).
    _text = f"qzeros int32 [K/g, ceil(N*{_b}/32)], dense along N: zero point"
    PACKINGS.register(word_packing(f"gptq-int{_b}-zeros", _text + " - 1", "AutoGPTQ, GPTQModel", _b, 1, before=True))
    PACKINGS.register(word_packing(f"gptq_v2-int{_b}-zeros", _text, "GPTQModel, gptq_v2", _b, before=True))
