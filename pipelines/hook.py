"""Registers dq in diffusers, transformers and peft when they are imported, or at once if they already are.

None has a plug-in mechanism: all look classes up in dicts (and two methods that save are wrapped). `import dq` must
stay light, so a meta-path finder waits for these modules, lets the ordinary machinery import them and registers right
after.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys

_PLUGINS = {
    "diffusers.quantizers.auto": "dq.pipelines.hf_diffusers",
    "diffusers.pipelines.pipeline_utils": "dq.pipelines.hf_pipelines",
    "transformers.quantizers.auto": "dq.pipelines.hf_transformers",
    "transformers.modeling_utils": "dq.pipelines.hf_saving",
    "peft": "dq.pipelines.hf_peft",
}


class _Loader(importlib.abc.Loader):
    """Wraps the real loader; registers once the module body has run."""

    def __init__(self, loader, name: str):
        self._loader, self._name = loader, name

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        _register(self._name)

    def __getattr__(self, attribute):
        return getattr(self._loader, attribute)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname not in _PLUGINS:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, fullname)
                return spec
        return None


_waiting: set[str] = set()


def _register(name: str) -> None:
    plugin = importlib.import_module(_PLUGINS[name])
    # A plug-in that was imported first is itself importing the library now: it calls `complete` at its end.
    if not hasattr(plugin, "register"):
        _waiting.add(name)
        return
    _waiting.discard(name)
    plugin.register(sys.modules[name])


def complete(plugin: str) -> None:
    """Registers the plug-in module of this name if its library arrived while it was being imported itself."""
    for name in [n for n in _waiting if _PLUGINS[n] == plugin]:
        _register(name)


def install() -> None:
    """Idempotent: registers in what is imported already and waits for the rest."""
    if not any(type(f).__name__ == "_Finder" and type(f).__module__ == __name__ for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name in _PLUGINS:
        if name in sys.modules:
            _register(name)
