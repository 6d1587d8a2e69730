"""Recipes: presets, TOML there and back, and one clear error for every kind of mistake."""

import json
import tomllib

import pytest

from dq.recipe import Recipe, Reconstruct, Rule, Target, presets
from dq.registry import DQError
from dq.spec import QuantSpec
from dq.transforms import TRANSFORMS

# The names that are fixed for users; presets that appear later add to them.
FIXED_NAMES = {"fp8", "int8", "int8-smooth", "w4a16", "w4a4-int4", "w4a4-int4-convrot", "w4a4-int4-svd", "w4a4-nvfp4"}
NEEDS_CALIBRATION = {"int8-smooth", "w4a4-int4-svd", "w4a4-nvfp4-svd"}
DATA_FREE = {"fp8", "int8", "w4a16", "w4a4-int4", "w4a4-int4-convrot", "w4a4-nvfp4"}

BASE = """
name = "mine"
[linear]
weights = "int8/channel"
activations = "int8/token"
"""


def load(tmp_path, text):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return Recipe.load(path)


def to_toml(value) -> str:
    """Inline TOML of JSON-like data; enough to write any recipe."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {to_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(to_toml(v) for v in value) + "]"
    return json.dumps(value)


def test_names():
    assert set(presets()) >= FIXED_NAMES
    for name in presets():
        recipe = Recipe.load(name)
        assert recipe.name == name and recipe.description


def test_which_presets_need_calibration():
    for name in DATA_FREE | NEEDS_CALIBRATION:
        assert Recipe.load(name).needs_calibration == (name in NEEDS_CALIBRATION), name


@pytest.mark.parametrize("name", presets())
def test_toml_round_trip(name, tmp_path):
    recipe = Recipe.load(name).with_(min_features=16, rules=(Rule("*.to_out.0", None, "too dear"), Rule("ff", W8)))
    text = "\n".join(f"{key} = {to_toml(value)}" for key, value in recipe.to_dict().items())
    assert load(tmp_path, text) == recipe
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


W8 = Target(QuantSpec("int8", "channel"))


@pytest.mark.parametrize("name", presets())
def test_house_rules_of_presets(name):
    """Modulation linears are weight-only: W8A16 in 8-bit recipes, W4A16 in 4-bit ones."""
    recipe = Recipe.load(name)
    bits = recipe.linear.weights.fmt.bits
    modulation = recipe.modulation  # recipes of language models have none
    assert modulation is None or (modulation.activations is None and modulation.transforms == ())
    assert modulation is None or modulation.weights.fmt.bits == bits
    assert name.startswith("w4") == (bits == 4)
    acts = recipe.linear.activations
    assert ("a16" in name) == (acts is None)
    if acts is not None and "static" in name:
        assert acts.strategy == "tensor" and not acts.dynamic and recipe.needs_calibration
    elif acts is not None:
        assert acts.strategy in ("token", "group") and acts.global_scale in (None, "token")


def test_recipes_are_values():
    recipe = Recipe.load("fp8")
    assert recipe == Recipe.load("fp8") and hash(recipe) == hash(Recipe.load("fp8"))
    assert Recipe.load(recipe) is recipe
    assert recipe.with_(min_features=16).min_features == 16 and recipe.min_features is None


def test_words_of_a_file(tmp_path):
    recipe = load(
        tmp_path,
        BASE
        + """
transforms = [{ name = "smooth", alpha = 0.3 }, "rotate", { name = "lowrank", rank = 16 }]
[modulation]
weights = { format = "int4", strategy = "group", group_size = 32 }
[[rules]]
match = "transformer_blocks.18.ff.net.2"
keep = "massive activations"
[[rules]]
match = "to_v"
weights = "int8/channel"
""",
    )
    assert recipe.linear.transforms == (("smooth", (("alpha", 0.3),)), ("rotate", ()), ("lowrank", (("rank", 16),)))
    assert recipe.modulation.weights == QuantSpec("int4", "group", 32)
    assert recipe.rules == (Rule("transformer_blocks.18.ff.net.2", None, "massive activations"), Rule("to_v", W8))
    assert recipe.needs_calibration


GROUP = "name = 'x'\n[linear]\nweights = {{ format = 'int4', strategy = 'group', group_size = {} }}\n"
RULE = "name = 'x'\n[linear]\nweights = {{ format = 'int8', scale_rule = 'mse', rule_params = {} }}\n"
MISTAKES = [
    ("name = 'x'\n", r"needs a name and a \[linear\] section"),
    ("[linear]\nweights = 'int8'\n", r"needs a name and a \[linear\] section"),
    ("name = 'x'\n[linear]\nactivations = 'int8/token'\n", r"needs weights, e.g. weights = 'int8/channel'"),
    (BASE + "wieghts = 'int8'\n", r"unknown recipe word 'wieghts'; did you mean 'weights'"),
    (BASE + "[modulations]\nweights = 'int8'\n", r"unknown recipe word 'modulations'; did you mean 'modulation'"),
    (BASE + "transforms = ['smoth']\n", r"unknown transform 'smoth'; did you mean 'smooth'"),
    (BASE + "transforms = ['rotate', 'smooth']\n", r"compose as .* got the order rotate, smooth"),
    (BASE + "transforms = ['lowrank', 'rotate']\n", r"compose as .* got the order lowrank, rotate"),
    (BASE + "transforms = ['smooth', 'smooth']\n", r"a transform may stand once .* got smooth, smooth"),
    (BASE + "transforms = [{ alpha = 0.5 }]\n", r"a transform needs a name"),
    (
        BASE + "transforms = [{ name = 'smooth', alfa = 1 }]\n",
        r"'smooth' takes no parameter 'alfa'; did you mean 'al",
    ),
    (
        BASE + "transforms = [{ name = 'rotate', state = 1 }]\n",
        r"'rotate' takes no parameter 'state'; known: kind, rows, seed, size",
    ),
    (BASE + "rounding = 'rnt'\n", r"unknown rounding 'rnt'; did you mean 'rtn'"),
    (BASE.replace("int8/token", "int8/tokne"), r"unknown strategy 'tokne'; did you mean 'token'"),
    (BASE.replace("int8/channel", "int5/channel"), r"unknown spec 'int5/channel'; did you mean 'int"),
    (BASE.replace("int8/channel", "int8/token"), r"weights cannot take the per-token grid int8/token"),
    (BASE.replace("int8/channel", "nvfp4-token"), r"weights cannot take the per-token grid nvfp4-token"),
    (BASE.replace("int8/token", "int8/channel"), r"activations take token or group grids, or a static tensor grid"),
    (BASE.replace("int8/token", "nvfp4"), r"activations need a second level per token.*nvfp4-token, not nvfp4"),
    (BASE + "[[rules]]\nkeep = 'x'\n", r"a recipe rule needs match = 'pattern'"),
    (BASE + "[[rules]]\nmatch = 'x'\nwieghts = 'int8'\n", r"needs weights|unknown recipe word 'wieghts'"),
    ("name = 'x'\nlinear = 'int8/channel'\n", r"a recipe section is a table, .* got 'int8/channel'"),
    (BASE + "transforms = 'smooth'\n", r"transforms is a list of names or tables"),
    (BASE + "[rules]\nmatch = 'x'\n", r"each rule begins \[\[rules\]\]; got {'match': 'x'}"),
    ("name = [\n", r"cannot read the recipe .*recipe\.toml"),
    # values of a wrong type or out of range
    (BASE.replace('"int8/channel"', "8"), r"are text such as 'int8/channel', .* got 8"),
    (BASE.replace('"int8/channel"', '["int8"]'), r"are text such as 'int8/channel', or a table; got \['int8'\]"),
    (BASE.replace("int8/channel", "int4/group²"), r"write the group size as group64"),
    (BASE.replace("int8/channel", "int4/group0"), r"sizes must be at least 1"),
    (GROUP.format('"64"'), r"group_size in a QuantSpec must be int or none; got '64'"),
    (GROUP.format("1.5"), r"group_size in a QuantSpec must be int or none; got 1.5"),
    (GROUP.format("true"), r"group_size in a QuantSpec must be int or none; got True"),
    ("name = 'x'\n[linear]\nweights = { format = 'int8', strategy = ['tensor'] }\n", r"strategy .* must be str"),
    ("name = 'x'\n[linear]\nweights = { format = 'int8', rule_params = [5] }\n", r"'absmax' takes no parameter '5'"),
    (RULE.format("5"), r"rule_params in a QuantSpec must be tuple"),
    (RULE.format("[['grid', 'x']]"), r"'mse' takes grid as int; got 'x'"),
    (RULE.format("[['grd', 1]]"), r"'mse' takes no parameter 'grd'; did you mean 'grid'"),
    ("min_features = 'big'\n" + BASE, r"min_features in a Recipe must be int or none; got 'big'"),
    ("min_features = -3\n" + BASE, r"min_features is at least 0, multiple at least 1; got -3"),
    ("multiple = 0\n" + BASE, r"multiple at least 1; got None, 0"),
    ("multiple = 'a'\n" + BASE, r"multiple in a Recipe must be int"),
    (BASE.replace('"mine"', "5"), r"name in a Recipe must be str"),
    ("rules = ['a']\n" + BASE, r"a recipe rule is a table; got 'a'"),
    (BASE + "[[rules]]\nmatch = 5\nkeep = 'x'\n", r"match in a Rule must be str; got 5"),
    (BASE + "[[rules]]\nmatch = 'x'\nkeep = false\n", r"keep = 'the reason' leaves 'x' in 16 bits.* got False"),
    (BASE + "[[rules]]\nmatch = 'x'\nkeep = 'y'\nweights = 'int8/channel'\n", r"without any other word; got 'y'"),
    (BASE + "rounding = 3\n", r"rounding is a name or a table"),
    (BASE + "transforms = [5]\n", r"transforms is a list of names or tables"),
    (BASE + "transforms = [{ name = 5 }]\n", r"unknown transform 5"),
    (BASE + "transforms = [{ name = 'lowrank', rank = -1 }]\n", r"'lowrank' got {'rank': -1}: rank is at least 0"),
    (BASE + "transforms = [{ name = 'lowrank', rank = 'a' }]\n", r"'lowrank' takes rank as int; got 'a'"),
    (BASE + "transforms = [{ name = 'lowrank', rank = 1.5 }]\n", r"'lowrank' takes rank as int; got 1.5"),
    (BASE + "transforms = [{ name = 'lowrank', iterations = 0 }]\n", r"iterations at least 1"),
    (BASE + "transforms = [{ name = 'rotate', size = 'a' }]\n", r"'rotate' got {'size': 'a'}: size is a power of 4"),
    (BASE + "transforms = [{ name = 'rotate', size = 100 }]\n", r"size is a power of 4"),
    (BASE + "transforms = [{ name = 'rotate', size = 128 }]\n", r"size is a power of 4"),
    (BASE + "transforms = [{ name = 'smooth', alpha = 'x' }]\n", r"takes alpha as float or int; got 'x'"),
    (BASE + "transforms = [{ name = 'smooth', alpha = 7 }]\n", r"'smooth' got {'alpha': 7}: alpha is 0 to 1"),
    (BASE + "transforms = [{ name = 'smooth', alpha = -1.0 }]\n", r"alpha is 0 to 1"),
    (BASE + "transforms = [{ name = 'smooth', alpha = nan }]\n", r"takes a finite alpha; got nan"),
    (BASE + "transforms = [{ name = 'smooth', search = 'no' }]\n", r"'smooth' takes search as bool; got 'no'"),
    (BASE + "transforms = [{ name = 'smooth', merge = 'men' }]\n", r"merge one of max, mean"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_mistakes(text, message, tmp_path):
    with pytest.raises(DQError, match=message):
        load(tmp_path, text)


def test_unknown_preset_suggests_near_ones():
    with pytest.raises(DQError, match=r"unknown recipe 'int8-smoth'; did you mean 'int8-smooth'"):
        Recipe.load("int8-smoth")
    with pytest.raises(DQError, match=r"unknown recipe 'nvfp4'; did you mean 'w4a4-nvfp4'"):
        Recipe.load("nvfp4")


def test_a_rule_without_a_reason(tmp_path):
    assert load(tmp_path, BASE + "[[rules]]\nmatch = 'x'\nkeep = true\n").rules == (Rule("x"),)


@pytest.mark.parametrize("recipe", [None, 5, {"name": "x"}, ["fp8"], True])
def test_what_is_no_recipe(recipe):
    with pytest.raises(DQError, match=r"a recipe is the name of a preset, .* got"):
        Recipe.load(recipe)


@pytest.mark.parametrize("name", ["../presets/fp8", "", "presets/fp8", "FP8"])
def test_only_names_are_presets(name):
    with pytest.raises(DQError, match="unknown recipe"):
        Recipe.load(name)


def test_files_that_are_no_text(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_bytes(bytes(range(256)))
    with pytest.raises(DQError, match=r"cannot read the recipe .*recipe\.toml"):
        Recipe.load(path)
    path.write_bytes(b"\xef\xbb\xbf" + BASE.encode())  # a byte order mark, as editors leave it
    assert Recipe.load(path).name == "mine"


def test_changes_are_checked():
    recipe = Recipe.load("fp8")
    with pytest.raises(DQError, match="a recipe takes no parameter 'min_feature'; did you mean 'min_features'"):
        recipe.with_(min_feature=3)
    with pytest.raises(DQError, match="a recipe takes linear as Target; got 'int8'"):
        recipe.with_(linear="int8")
    with pytest.raises(DQError, match=r"the rules of a recipe are dq\.recipe\.Rule values; got 'x'"):
        recipe.with_(rules=("x",))
    with pytest.raises(DQError, match="min_features is at least 0"):
        recipe.with_(min_features=-1)


def test_missing_file():
    with pytest.raises(DQError, match=r"cannot read the recipe nowhere\.toml"):
        Recipe.load("nowhere.toml")


def test_parameters_of_every_transform_are_known():
    """What a TOML file may say about a transform is what its `fit` takes, no more."""
    for transform in TRANSFORMS:
        with pytest.raises(DQError, match="takes no parameter 'made_up'"):
            Target(QuantSpec("int8", "channel"), transforms=((transform.name, (("made_up", 1),)),))


def test_presets_are_plain_toml(root):
    for path in sorted((root / "dq" / "presets").glob("*.toml")):
        assert tomllib.loads(path.read_text())["name"] == path.stem


@pytest.mark.parametrize("bad", [{"lr": float("nan")}, {"lr": float("inf")}, {"strength": float("nan")}], ids=str)
def test_reconstruction_refuses_numbers_that_are_none(bad):
    """A rate of NaN would leave every rounding as it was, without a word."""
    with pytest.raises(DQError):
        Reconstruct(**bad)
