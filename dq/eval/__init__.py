"""Metrics, comparison against the 16-bit model, benchmarks and the report.

The source lies in the root folder ``eval/``; a wheel carries it here (docs/decisions/0001).
"""

from dq._layout import extend

__path__ = extend(__path__, "eval")
