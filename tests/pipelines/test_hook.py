"""The post-import hook: dq reaches diffusers and transformers whatever is imported first, and costs nothing before."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import dq

REGISTERED = """
import diffusers.quantizers.auto as d, transformers.quantizers.auto as t
for auto in (d, t):
    assert auto.AUTO_QUANTIZER_MAPPING["dq"].__module__.startswith("dq.pipelines.hf_"), auto
    assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["dq"].__module__.startswith("dq.pipelines.hf_"), auto
"""
LOADS = """
from diffusers import FluxTransformer2DModel
from transformers import LlamaForCausalLM
import sys
for cls, folder in ((FluxTransformer2DModel, sys.argv[1]), (LlamaForCausalLM, sys.argv[2])):
    model = cls.from_pretrained(folder)
    kinds = {type(m).__name__ for m in model.modules()}
    assert "QuantizedLinear" in kinds and model.hf_quantizer is not None, kinds
"""
ONE_FINDER = """
import sys
assert sum(type(f).__module__ == "dq.pipelines.hook" for f in sys.meta_path) == 1
"""
# Each is one process. "dq first" with real loading is what test_save_load.py does.
CASES = {
    "dq last, models imported": """
from diffusers import FluxTransformer2DModel
from transformers import LlamaForCausalLM
import dq""" + REGISTERED + LOADS,
    "dq between, imported twice, reloaded": """
from transformers.quantizers import auto
import dq
import diffusers, importlib
import dq
importlib.reload(dq)
""" + REGISTERED + """
importlib.reload(dq)
import dq.pipelines.hook
importlib.reload(dq.pipelines.hook).install()
""" + ONE_FINDER + REGISTERED,
    "dq first, libraries reloaded": """
import dq
import importlib, transformers.quantizers.auto as t
assert t.__spec__.name == t.__name__ and t.__file__.endswith("auto.py")
importlib.reload(t)
""" + ONE_FINDER + REGISTERED,
    "a config before either library": """
from dq import DQConfig
assert DQConfig("int8").name == "int8"
""" + REGISTERED + LOADS.strip() + """
import dq.pipelines.hf_transformers as plugin
from transformers.quantizers import auto
assert auto.AUTO_QUANTIZER_MAPPING["dq"] is plugin.DQTransformersQuantizer
""",
    "light": """
import sys, dq
assert not {"diffusers", "transformers"} & set(sys.modules)
""" + ONE_FINDER,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("hook")
    for name, model in (("flux", tiny.flux()), ("llama", tiny.llama())):
        dq.quantize(model, tiny.recipe("int8"), progress=False)
        model.save_pretrained(root / name)
    return [str(root / "flux"), str(root / "llama")]


@pytest.fixture(scope="module")
def runs(checkpoints):
    """name -> finished process, two at a time."""
    codes = CASES | {"without dq": LOADS}

    def run(code):
        return subprocess.run([sys.executable, "-W", "error", "-c", code, *checkpoints], capture_output=True, text=True)

    def start(name):
        return name, run(codes[name])

    with ThreadPoolExecutor(2) as pool:
        return dict(pool.map(start, codes))


@pytest.mark.parametrize("name", CASES)
def test_import_order(runs, name):
    assert runs[name].returncode == 0, runs[name].stderr[-2000:]


def test_without_dq_a_checkpoint_is_refused(runs):
    """diffusers refuses what it does not know. (transformers only warns: the model card must name the import.)"""
    assert runs["without dq"].returncode != 0
    assert "Unknown quantization type, got dq" in runs["without dq"].stderr


def test_other_finders_are_left_alone():
    from dq.pipelines.hook import _Finder

    assert _Finder().find_spec("diffusers", None) is None
    assert _Finder().find_spec("transformers.models", None) is None
