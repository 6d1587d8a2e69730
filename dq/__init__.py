"""dq: post-training quantization of diffusers pipelines and transformers models, with real low-bit kernels and proof.

Importing dq is light: diffusers and transformers are imported by those who use them, and learn about dq when they are.
"""

from importlib import import_module
from typing import Any

from dq import version as _version
from dq.pipelines import hook as _hook

_LAZY = {
    "DQError": "dq.registry",
    "QuantSpec": "dq.spec",
    "QTensor": "dq.qtensor",
    "QuantizedLinear": "dq.linear",
    "layer_info": "dq.linear",
    "Recipe": "dq.recipe",
    "Plan": "dq.planning",
    "Record": "dq.records",
    "QuantizeReport": "dq.loop",
    "Prompts": "dq.pipelines.calibration",
    "Text": "dq.pipelines.text",
    "plan": "dq.pipelines.api",
    "quantize": "dq.pipelines.api",
    "dequantize": "dq.pipelines.api",
    "fold": "dq.pipelines.api",
    "correct": "dq.pipelines.correction",
    "adapter_info": "dq.pipelines.adapters",
    "load_lora": "dq.pipelines.lora",
    "demo_path": "dq.pipelines.demo",
    "demo_kwargs": "dq.pipelines.demo",
    "demo_prompts": "dq.pipelines.demo",
    "evaluate": "dq.eval.compare",
    "DQConfig": "dq.pipelines.config",
    "KVCache": "dq.pipelines.kv_cache",
    "export": "dq.pipelines.export",
    "load": "dq.pipelines.importing",
    "load_exported": "dq.pipelines.export",
    "evaluate_text": "dq.eval.perplexity",
    "evaluate_tasks": "dq.eval.tasks",
    "measure_generation": "dq.pipelines.generation",
}
__version__ = _version.VERSION
__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'dq' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


_hook.install()
