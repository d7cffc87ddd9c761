"""The releases, before and after a fix of how they accumulate, that install beside PyTorch 2.15.

Others do not: releases of Lightning before 2.0, of Accelerate before 0.20 and of Transformers before 4.40 ask for an
older PyTorch or Python; DeepSpeed, verl and prime-rl need a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

TORCH = "torch==2.15.0"


@dataclass(frozen=True)
class Release:
    """A release, a script that trains with it, and whether it is right."""

    title: str
    version: str
    packages: tuple[str, ...]
    script: tuple[str, ...]
    is_right: bool
    says: str = ""

    @property
    def name(self) -> str:
        """Name the release on the command line, such as trl-0.13.0-dpo."""
        return f"{self.title.lower().replace(', ', '-').replace(' ', '-')}-{self.version}"


_MODEL, _CLASSIFIER = "Transformers, language model", "Transformers, classifier"
_MEANS, _DIVIDED = "a mean of means", "the loss is not divided by the accumulation steps"


def _transformers(title: str, version: str, accelerate: str, *, is_right: bool, says: str = "") -> Release:
    script = "language_model.py" if title == _MODEL else "classifier.py"
    packages = (TORCH, f"transformers=={version}", f"accelerate=={accelerate}")
    return Release(title, version, packages, (script,), is_right, says)


def _trl(kind: str, version: str, transformers: str, *, is_right: bool, says: str = "") -> Release:
    packages = (TORCH, f"trl=={version}", f"transformers=={transformers}")
    return Release(f"TRL, {kind.upper()}", version, packages, ("preferences.py", kind), is_right, says)


RELEASES = (
    _transformers(_MODEL, "4.44.2", "0.34.2", is_right=False, says=_MEANS),
    _transformers(_MODEL, "4.47.0", "1.3.0", is_right=False, says=_DIVIDED),
    _transformers(_MODEL, "4.48.3", "1.3.0", is_right=True),
    _transformers(_MODEL, "5.24.0", "1.15.0", is_right=True),
    _transformers(_CLASSIFIER, "4.47.0", "1.3.0", is_right=False, says=_DIVIDED),
    _transformers(_CLASSIFIER, "4.48.3", "1.3.0", is_right=True),
    _transformers(_CLASSIFIER, "5.24.0", "1.15.0", is_right=False, says=_DIVIDED),
    _trl("dpo", "0.13.0", "4.48.3", is_right=False, says=_DIVIDED),
    _trl("dpo", "0.14.0", "4.48.3", is_right=True),
    _trl("cpo", "0.13.0", "4.48.3", is_right=False, says=_DIVIDED),
    _trl("cpo", "0.14.0", "4.48.3", is_right=True),
)
