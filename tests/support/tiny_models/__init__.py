"""Tiny configurations of diffusers' denoisers, with inputs: `CASES[name].build()` and `CASES[name].inputs()`.

A case is named as its class, or `<class>@<variant>`. Weights are random and of a size at which every layer matters.
Found on sys.path in tests (`pythonpath` in pyproject.toml): `from tiny_models import CASES`.
"""

from tiny_models import audio, image, image_more, unet, video, video_more
from tiny_models.case import Case

CASES: dict[str, Case] = {
    case.name: case for module in (image, image_more, video, video_more, audio, unet) for case in module.CASES
}
