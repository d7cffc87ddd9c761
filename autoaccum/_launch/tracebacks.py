"""Finds what may have ended the processes that wrote a log: tracebacks, and messages of C++ before it aborts.

A traceback is a header, indented lines, and a line that begins with the exception's type; chains and groups are joined.
Tracebacks that do not end a process are left out: of threads, finalizers, functions at exit and logging handlers.
Whether another one ended a process depends on exit statuses, which `last_words.py` checks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_HEADER = "Traceback (most recent call last)"
_GROUP_HEADER = "+ Exception Group Traceback (most recent call last)"
_CAUSE = "The above exception was the direct cause of the following exception"
_CONTEXT = "During handling of the above exception, another exception occurred"
_EXCEPTION = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(?:: |:?$)")
_ABORT = re.compile(
    r"terminate called after throwing an instance of '(?P<gnu>[^']*)'"
    r"|terminating (?:due to|with) uncaught exception of type (?P<llvm>[\w:]+)"
    r"|terminate called without an active exception"
)
# The line before a traceback that does not end a process: threading, sys.unraisablehook, atexit, logging, asyncio.
_ENDS_NOTHING = re.compile(
    r"Exception ignored |Exception in thread |Error in atexit|Error in sys\.excepthook|--- Logging error ---"
    r"|Task exception was never retrieved|Exception in callback |Future exception was never retrieved"
)
_ASYNCIO_CONTEXT = re.compile(r"future: <|handle: <|task: <")
# Labels of lines if several processes share a stream: torchrun --tee, srun --label, mpirun --tag-output, Ray.
_LABEL = re.compile(r"(?:\[[A-Za-z_.-]*\d+\]:|\d+:|\[\d+,\d+\]<std\w+>:|\([^()]{0,80}?pid=\d+[^()]{0,80}\)) ?")
_LABELS_BEGIN = frozenset("[(0123456789")
# torch writes it only before lines of an uncaught exception.
_RANK = re.compile(r"\[rank(?P<rank>\d+)\]: ?")
_RANK_BEHIND_A_BAR = re.compile(rf"\[rank\d+\]: {re.escape(_HEADER)}")
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RULE = re.compile(r"=={9,}\s*$")
_PART = re.compile(r"\s*\+[-+]*-{5,} (?:\d+|\.\.\.) -{5,}")
_FRAME = re.compile(r'\s+File "[^"]*", line \d+, in (?P<name>.+)')
# The outermost frame: a script, `python -m`, a multiprocessing process.
_FIRST_FRAMES = ("<module>", "_run_module_as_main", "_bootstrap")
# Marks the traceback of another process or thread in an exception's message.
_TAKEN_ALONG = re.compile(r"Original Traceback|-- Process \d+ terminated with the following error")
# NCCL messages have four lines, CUDA messages five.
_MESSAGE_LINES = 8
_HALF_CHARS = 2000
# Threads may abort the process this many lines after a traceback; C++ may print its frames in between.
_NEAR = 64


class Raised(NamedTuple):
    """An exception as a traceback shows it: its type with the module, and the first lines of its message."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Ending:
    """What may have ended a process.

    Attributes:
        stream: The label of the lines; empty if they have none.
        number: The rank or task that the label names.
        is_of_rank: Whether torch marked the lines as an uncaught exception of this rank.
        start: The number of its first line in the log.
        exception: The exception raised.
        causes: The exceptions it was raised from, nearest first.
        parts: The exceptions of a group.
        is_caught: Whether the traceback begins within a function, where the exception was caught and logged.
        lines_after: The number of lines of the stream that follow.
        aborts: Whether C++ wrote it and ended the process with SIGABRT.
        report: A launcher's report of the processes that failed.
    """

    stream: str
    number: int | None
    is_of_rank: bool
    start: int
    exception: Raised
    causes: tuple[Raised, ...] = ()
    parts: tuple[Raised, ...] = ()
    is_caught: bool = False
    lines_after: int = 0
    aborts: bool = False
    report: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the exception's type, without its module."""
        return self.exception.kind.rpartition(".")[2]


class _Line(NamedTuple):
    at: int
    text: str


def endings(text: str) -> list[Ending]:
    """Return what may have ended processes, in the order of the log."""
    found = [ending for label, lines in _streams(text).items() for ending in _Stream(label, lines).endings()]
    return sorted(found, key=lambda ending: ending.start)


def unlabelled(text: str) -> list[str]:
    """Return the lines of a log without colours and without the labels of processes."""
    return [_labels(line)[1] for line in _lines(text)]


def _streams(text: str) -> dict[str, list[_Line]]:
    """Return the lines of each process, as far as labels distinguish them."""
    streams: dict[str, list[_Line]] = defaultdict(list)
    for at, line in enumerate(_lines(text)):
        label, rest = _labels(line)
        streams[label].append(_Line(at, rest))
    return streams


def _lines(text: str) -> list[str]:
    """Return lines without colours; long ones, such as printed arrays, are reduced to their beginning and end."""
    lines = _COLOURS.sub("", text).splitlines()
    return [line if len(line) <= 2 * _HALF_CHARS else line[:_HALF_CHARS] + line[-_HALF_CHARS:] for line in lines]


def _labels(line: str) -> tuple[str, str]:
    """Return the label of a line, preferably that of a rank, and the rest of the line."""
    if _HEADER in line and (behind := _RANK_BEHIND_A_BAR.search(line)):
        line = line[behind.start() :]
    if line[:1] not in _LABELS_BEGIN:
        return "", line
    label, found = "", _RANK.match(line) or _LABEL.match(line)
    while found is not None:
        line = line[found.end() :]
        if found.re is _RANK:
            return found.group().strip(), line
        label += found.group().strip()
        found = _RANK.match(line) or _LABEL.match(line)
    return label, line


class _Stream:
    """The lines of one process, without its label, or of several that have none."""

    def __init__(self, label: str, lines: Sequence[_Line]) -> None:
        self._label = label
        self._lines = lines
        numbers = re.findall(r"\d+", label)
        self._number = int(numbers[-1]) if numbers else None

    def endings(self) -> Iterator[Ending]:
        """Yield what may have ended the process, the last one last."""
        begins = self._begins()
        unfinished = 0
        chain: list[Raised] = []
        ends_nothing = False
        former: tuple[int, Ending] | None = None
        for begin, end in pairwise([*begins, len(self._lines)]):
            aborted = _ABORT.search(self._lines[begin].text)
            if aborted is not None:
                former = (begin, self._abort(begin, end, aborted, former))
                yield former[1]
                continue
            if not chain:
                ends_nothing = self._ends_nothing(begin)
            at = next((at for at in range(begin + 1, end) if _EXCEPTION.match(self._lines[at].text)), None)
            is_group = _GROUP_HEADER in self._lines[begin].text
            if at is None and not is_group:
                unfinished += 1
                continue
            exception = self._group(begin, end) if is_group else self._exception(at or begin, end)
            link = self._link(begin, end)
            if link is None and not ends_nothing:
                ending = self._ending(begin, at or begin, exception, chain, end)
                former = (at or begin, ending)
                yield ending
                # Lines of two processes without labels: two headers, then two exceptions.
                for other in range(at + 1, min(at + 2 * unfinished + 1, end)) if at is not None else ():
                    if _EXCEPTION.match(self._lines[other].text):
                        yield self._ending(begin, other, self._exception(other, end), [], end)
            unfinished = 0
            chain = [] if link is None else [exception, *(chain if link == _CAUSE else ())]
            if link == _CONTEXT:
                chain = [Raised("", "")]  # the chain continues, but the next exception was not raised from this one

    def _begins(self) -> list[int]:
        """Return the starts of tracebacks and aborts; those in a group or a launcher's report belong to it."""
        begins: list[int] = []
        at = 0
        while at < len(self._lines):
            line = self._lines[at].text
            if _HEADER in line or ("terminat" in line and _ABORT.search(line)):
                begins.append(at)
                if _GROUP_HEADER in line:
                    at = self._group_end(at) - 1
            elif "ChildFailedError:" in line:
                at = self._report_end(at) - 1
            at += 1
        return begins

    def _group_end(self, begin: int) -> int:
        at = begin + 1
        while at < len(self._lines) and self._lines[at].text.lstrip()[:1] in ("|", "+"):
            at += 1
        return at

    def _report_end(self, begin: int) -> int:
        rules = [at for at in range(begin, len(self._lines)) if _RULE.match(self._lines[at].text)][:2]
        return rules[1] + 1 if len(rules) == 2 else len(self._lines)  # noqa: PLR2004 - above and below

    def _ends_nothing(self, begin: int) -> bool:
        before = [self._lines[at].text for at in range(max(0, begin - 2), begin)]
        while before and _ASYNCIO_CONTEXT.match(before[-1]):
            before.pop()
        return bool(before) and _ENDS_NOTHING.match(before[-1]) is not None

    def _is_caught(self, begin: int) -> bool:
        """Whether a traceback begins within a function and is not part of another's message."""
        if any(_TAKEN_ALONG.search(line.text) for line in self._lines[max(0, begin - 1) : begin + 1]):
            return False
        frame = next((found for line in self._lines[begin + 1 : begin + 3] if (found := _FRAME.match(line.text))), None)
        return frame is not None and not frame["name"].startswith(_FIRST_FRAMES)

    def _link(self, begin: int, end: int) -> str | None:
        """Return the sentence that joins a traceback to the next; None if it is the last of its chain."""
        for at in range(max(begin, end - 4), end):
            for sentence in (_CAUSE, _CONTEXT):
                if sentence in self._lines[at].text:
                    return sentence
        return None

    def _exception(self, at: int, end: int) -> Raised:
        found = _EXCEPTION.match(self._lines[at].text)
        assert found is not None
        return Raised(found["type"], self._message(at, end))

    def _message(self, at: int, end: int) -> str:
        lines: list[str] = []
        for line in self._lines[at : min(at + _MESSAGE_LINES, end)]:
            if not line.text.strip():
                break
            lines.append(line.text)
        return "\n".join(lines)

    def _group(self, begin: int, end: int) -> Raised:
        return Raised("ExceptionGroup", self._message(begin + 1, end))

    def _parts(self, begin: int) -> tuple[Raised, ...]:
        """Return the exceptions in a group and its nested groups."""
        parts: list[Raised] = []
        is_open = False
        for line in self._lines[begin : self._group_end(begin)]:
            if _PART.match(line.text):
                is_open = True
            elif is_open:
                said = line.text.lstrip(" |+-")
                found = _EXCEPTION.match(said)
                if found is not None and not re.search(r"[|+]  +\S", line.text):
                    is_open = False
                    if not found["type"].endswith("Group"):
                        parts.append(Raised(found["type"], said))
        return tuple(parts)

    def _ending(self, begin: int, at: int, exception: Raised, chain: Sequence[Raised], end: int) -> Ending:
        is_group = _GROUP_HEADER in self._lines[begin].text
        is_report = exception.kind.endswith("ChildFailedError")
        return Ending(
            self._label,
            self._number,
            self._label.startswith("[rank"),
            self._lines[begin].at,
            exception,
            tuple(one for one in chain if one.kind),
            self._parts(begin) if is_group else (),
            self._is_caught(begin),
            len(self._lines) - at,
            report=tuple(line.text for line in self._lines[begin:end]) if is_report else (),
        )

    def _abort(self, begin: int, end: int, found: re.Match[str], former: tuple[int, Ending] | None) -> Ending:
        """Return the C++ exception, or the Python exception after which remaining threads made C++ abort."""
        start, kind = self._lines[begin].at, found["gnu"] or found["llvm"]
        if kind is not None:
            what = next((at for at in range(begin, min(begin + 4, end)) if "what():" in self._lines[at].text), begin)
            said = Raised(kind, self._message(what, end).strip())
            return Ending(self._label, self._number, is_of_rank=False, start=start, exception=said, aborts=True)
        if former is not None and not former[1].aborts and begin - former[0] <= _NEAR:
            return replace(former[1], start=start, is_of_rank=False, aborts=True)
        said = Raised("terminate", self._lines[begin].text)
        return Ending(self._label, self._number, is_of_rank=False, start=start, exception=said, aborts=True)
