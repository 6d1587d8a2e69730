"""Benchmarks: what formats lose (`dq bench formats`) and what quantizing costs (`dq bench quantize`)."""
