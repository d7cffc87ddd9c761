"""Loads `observer.py` into each Python of a command, once torch is imported, and hands over to the next sitecustomize.

It needs the standard library alone: the command's Python may lack autoaccum.
"""

import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - every Python of the command starts with it


def _load(spec: Any) -> Any:
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _AfterTorch:
    """A finder that starts the observer at the end of the import of torch."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec("torch")
        finally:
            sys.meta_path.insert(0, self)  # who asks for torch, as transformers does, may import it later
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_observe(module: Any) -> None:
                execute(module)
                file = os.path.join(os.path.dirname(_HERE), "observer.py")  # noqa: PTH118, PTH120
                observer = _load(importlib.util.spec_from_file_location("_autoaccum_observer", file))
                observer.observe_process(os.environ["_AUTOACCUM_VERIFY"])

            spec.loader.exec_module = execute_and_observe  # type: ignore[method-assign]
        return spec


sys.path[:] = [place for place in sys.path if os.path.abspath(place) != _HERE]  # noqa: PTH100
if "_AUTOACCUM_VERIFY" in os.environ:
    sys.meta_path.insert(0, _AfterTorch())
_next = importlib.machinery.PathFinder.find_spec("sitecustomize")
if _next is not None:
    _load(_next)
