"""Import hook: calls functions once the training script, or a library, has imported a module.

`flopwatch run` attaches to PyTorch with it, so that a script still imports torch late, or never. A finder in
sys.meta_path gets the module's spec from the other finders, and adds the calls after its loader's exec_module.
https://docs.python.org/3/reference/import.html#the-meta-path
"""

import logging
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

log = logging.getLogger("flopwatch")


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call `then` once the module `name` has been imported, now if it already is. Exceptions of `then` are logged."""
    if name in sys.modules:
        _call(then)
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.waiting.setdefault(name, []).append(then)


def _call(then: Callable[[], None]) -> None:
    try:
        then()
    except Exception:
        log.warning("flopwatch could not attach; the program goes on without it", exc_info=True)


class _Finder(MetaPathFinder):
    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[], None]]] = {}

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        """Return another finder's spec for a module in `waiting`, with a loader that runs the callbacks, else None."""
        if fullname not in self.waiting:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None:
                self._add_callbacks(fullname, spec)
                return spec
        return None

    def _add_callbacks(self, name: str, spec: ModuleSpec) -> None:
        # On the instance, so that the loader keeps its type. Mere lookups get a loader of their own, which never runs.
        loader = spec.loader
        original = getattr(loader, "exec_module", None)
        if loader is None or original is None or not hasattr(loader, "__dict__"):
            return

        def exec_module(module: ModuleType) -> None:
            del loader.__dict__["exec_module"]
            original(module)
            for then in self.waiting.pop(name, ()):
                _call(then)
            if not self.waiting and self in sys.meta_path:
                sys.meta_path.remove(self)

        loader.__dict__["exec_module"] = exec_module


_finder = _Finder()
