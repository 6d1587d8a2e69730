"""What a user may ask for in a `DQConfig`: checked when it is made, before anything is read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dq.ops import MODES
from dq.recipe import Recipe, presets
from dq.registry import DQError, suggest, typed

WORDS = ("recipe", "skip", "activations", "fp8_source")
FP8_SOURCES = ("refuse", "dequantize")


def on_load_recipe(recipe: Any, unknown: Iterable[str] = ()) -> Recipe:
    """The recipe of a quantization while loading.

    Raises:
        DQError: none is named, words that nobody knows, or what cannot be done to a model that is not there yet.
    """
    for word in unknown:
        raise DQError(f"DQConfig takes no {word!r}{suggest(str(word), WORDS)}")
    if recipe is None:
        raise DQError(f"DQConfig needs a recipe, e.g. DQConfig('int8'); for loading there are {_data_free()}")
    found = Recipe.from_dict(recipe) if isinstance(recipe, dict) else Recipe.load(recipe)
    why = "needs calibration" if found.needs_calibration else "rewrites the whole model" if found.rewrites else ""
    if why:
        raise DQError(
            f"recipe {found.name!r} {why}, which cannot be done while loading: load the 16-bit model, then "
            f"dq.quantize(model, {found.name!r}{', calibration=...' * found.needs_calibration}), "
            f"or take one of {_data_free()}"
        )
    return found


def _data_free() -> str:
    found = [(name, Recipe.load(name)) for name in presets(decoders=False)]
    return ", ".join(name for name, recipe in found if not recipe.needs_calibration)


def check_words(skip: Any, activations: Any, fp8_source: Any) -> None:
    """Refuses words of a `DQConfig` before anything is read.

    Raises:
        DQError: naming the word.
    """
    for pattern in typed(skip, (list, tuple, set), "skip takes a list of patterns"):
        typed(pattern, str, "a skip pattern is text")
    for value, known, what in ((activations, (None, *MODES), "activations"), (fp8_source, FP8_SOURCES, "fp8_source")):
        if value not in known:
            raise DQError(f"unknown {what} {value!r}{suggest(str(value), [str(k) for k in known if k])}")
