"""What a wrong `quantization_config` is told: of a pipeline, and of a checkpoint that lost a part of it."""

import json

import pytest
from diffusers import FluxPipeline
from diffusers.quantizers import PipelineQuantizationConfig

import dq


def test_a_pipeline_config_without_components_is_told_the_word(tiny, tmp_path):
    """diffusers then hands every component to the quantizer, the first of which has nothing to quantize."""
    tiny.flux_pipeline().save_pretrained(tmp_path)
    recipe = dq.Recipe.load("int8").with_(min_features=64)
    asked = PipelineQuantizationConfig(quant_backend="dq", quant_kwargs={"recipe": recipe.to_dict()})
    with pytest.raises(dq.DQError, match=r"nothing to quantize in .* components_to_quantize, e\.g\. \['transformer'\]"):
        FluxPipeline.from_pretrained(tmp_path, quantization_config=asked)


@pytest.mark.parametrize("kind", ["flux", "llama"])
@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (("recipe", "family", "source"), "holds family, recipe, source, but not the table of its quantized layers"),
        (("recipe",), r"the files hold codes \(.*\.qweight\), and the quantization_config beside them lost the table"),
        ((), "holds nothing, but not the table of its quantized layers .*: restore config.json"),
        (("recipe", "family", "format_version", "kinds"), "quantization_config lost layers: restore config.json"),
        (("recipe", "layers", "format_version"), "quantization_config lost kinds: restore config.json"),
    ],
)
def test_a_checkpoint_that_lost_its_table_of_layers(tiny, tmp_path, kind, kept, message):
    """The advice is to restore the file, not to name a recipe or to leave out a config that nobody gave."""
    model = getattr(tiny, kind)()
    dq.quantize(model, tiny.recipe("int8"), progress=False)
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] = {
        k: v for k, v in config["quantization_config"].items() if k in ("quant_method", *kept)
    }
    file.write_text(json.dumps(config))
    with pytest.raises(dq.DQError, match=message):
        type(model).from_pretrained(tmp_path)
