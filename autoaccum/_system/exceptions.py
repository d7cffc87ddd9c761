"""Adds notes to exceptions of users' code."""


def note(error: BaseException, text: str) -> None:
    """Add a note to an exception, also to one that refuses attributes, such as a frozen dataclass."""
    vars(error).setdefault("__notes__", []).append(text)
