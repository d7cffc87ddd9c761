"""The calls of `fit` that examples make."""

import importlib.util
import inspect
from unittest import mock

import autoaccum


def loaded(path):
    """Return the module of an example, whose functions take sizes."""
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call_of(train, **sizes):
    """Return the arguments of `fit`, by name, with which an example's function trains."""
    signature = inspect.signature(autoaccum.fit)
    with mock.patch.object(autoaccum, "fit", lambda *given, **named: signature.bind(*given, **named).arguments):
        return train(**sizes)
