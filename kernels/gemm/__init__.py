"""Matrix products with quantized weights: expansion of 4-bit weights, GEMMs, and GEMVs for few rows.

Every kernel is an operator `dq::...` with a float32 torch reference beside it; the kernels themselves are in `jit/`,
imported only where Triton can run. dq.kernels.backends puts them together to linears.
"""
