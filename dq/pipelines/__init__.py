"""Everything that knows diffusers and transformers: families, calibration, plug-ins, demo.

The source lies in the root folder ``pipelines/``; a wheel carries it here (docs/decisions/0001).
"""

from dq._layout import extend

__path__ = extend(__path__, "pipelines")
