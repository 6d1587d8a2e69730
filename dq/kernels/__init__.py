"""Low-bit matrix products and their plain-torch references.

The source lies in the root folder ``kernels/``; a wheel carries it here (docs/decisions/0001).
"""

from dq._layout import extend

__path__ = extend(__path__, "kernels")
