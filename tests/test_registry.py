"""The registry: discovery by folder, near names in errors, one value per name."""

import sys

import pytest

from dq.registry import DQError, Registry, check_params, suggest, typed


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of two modules that register values, and its registry."""
    folder = tmp_path / "made_up_kinds"
    folder.mkdir()
    registry = Registry("kind", "made_up_kinds")
    (folder / "__init__.py").write_text("REGISTRY = None\n")
    for name in ("alpha", "beta"):
        (folder / f"{name}.py").write_text(
            f"import made_up_kinds\nmade_up_kinds.REGISTRY.register({name!r}, {name!r})\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    import made_up_kinds

    made_up_kinds.REGISTRY = registry
    yield registry, folder
    for name in [n for n in sys.modules if n.partition(".")[0] == "made_up_kinds"]:
        del sys.modules[name]


def test_modules_of_the_folder_are_found(package):
    registry, _ = package
    assert registry.names() == ["alpha", "beta"]
    assert registry.get("beta") == "beta" and "alpha" in registry and "gamma" not in registry
    assert list(registry) == ["alpha", "beta"]


def test_unknown_name_suggests_near_ones(package):
    with pytest.raises(DQError, match=r"unknown kind 'alpa'; did you mean 'alpha'\?"):
        package[0].get("alpa")
    with pytest.raises(DQError, match="unknown kind 'xyz'; known: alpha, beta"):
        package[0].get("xyz")


def test_a_name_taken_by_another_module_is_refused(package):
    """Two files that register one name: the second must not replace the first in silence."""
    registry, folder = package
    (folder / "gamma.py").write_text("import made_up_kinds\nmade_up_kinds.REGISTRY.register('other', 'alpha')\n")
    with pytest.raises(DQError, match="kind 'alpha' is registered twice"):
        registry.names()


def test_a_module_run_again_may_register_again(package):
    registry, _ = package
    registry.names()
    import importlib

    importlib.reload(sys.modules["made_up_kinds.alpha"])
    assert registry.names() == ["alpha", "beta"]


def test_decorator_form():
    registry = Registry("kind", "dq.rounding")

    @registry.register
    def made_up():
        return 1

    assert registry.get("made_up") is made_up


def test_suggest():
    assert suggest("int8-smoth", ["int8-smooth", "fp8"]) == "; did you mean 'int8-smooth'?"
    assert suggest("x", []) == "; none are known."
    assert suggest("qqq", ["b", "a"]) == "; known: a, b."


def test_error_is_a_value_error():
    assert issubclass(DQError, ValueError)


def test_long_lists_of_names_are_cut():
    assert suggest("zzz", [f"name{i}" for i in range(40)]).endswith(" ...")
    assert suggest("zzz", [f"name{i}" for i in range(40)]).count(",") == 11
    assert suggest("zzz", ["a", "b"]) == "; known: a, b."


def test_typed():
    assert typed(3, int, "x") == 3 and typed(True, bool, "x") is True and typed(None, (str, type(None)), "x") is None
    for value, kinds in ((True, int), ("3", int), (3, str), (None, (int, str))):
        with pytest.raises(DQError, match=f"a size; got {value!r}"):
            typed(value, kinds, "a size")


def test_parameters_by_signature():
    def function(state, rank: int = 0, alpha: float = 0.5, free=None):
        pass

    check_params("it", function, [("rank", 3), ("alpha", 1), ("alpha", 0.5), ("free", "anything")])
    for word, value, message in (("rank", 0.5, "takes rank as int"), ("state", 1, "takes no parameter 'state'")):
        with pytest.raises(DQError, match=f"it {message}"):
            check_params("it", function, [(word, value)])
