"""Output that fails is dropped: a full disk, a pipe that nobody reads or a closed stream ends no training."""

import json
import logging
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum import JSONLinesLog
from autoaccum._training.console import LineProgress  # writes the lines

FULL = Path("/dev/full")

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")


def broken(way):
    if way == "closed":
        return None
    if way == "full disk":
        return FULL.open("w")
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.fixture(params=["full disk", "no reader", "closed"])
def stderr(request, monkeypatch):
    stream = broken(request.param)
    monkeypatch.setattr(sys, "stderr", stream)
    yield stream
    if stream is not None:
        stream.close()  # which raises where something is still to be written


def train(**options):
    torch.manual_seed(0)
    batches = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(3)]
    return autoaccum.fit(nn.Linear(3, 2), batches, 4, micro_batch=4, device="cpu", **options)


@pytest.mark.parametrize("progress", [LineProgress(every_s=0), "bar", "auto"], ids=["lines", "bar", "auto"])
def test_training_goes_on_where_stderr_fails(stderr, progress):
    assert train(progress=progress).steps == 3


def test_log_on_a_full_disk_is_said_once_and_training_goes_on(capsys):
    result = train(callbacks=[JSONLinesLog("/dev/full")], progress=False)

    (line,) = [line for line in capsys.readouterr().err.splitlines() if "/dev/full" in line]
    assert "cannot be written (No space left on device); training goes on" in line
    assert result.steps == 3


def test_line_that_was_cut_by_a_full_disk_does_not_spoil_the_next(tmp_path):
    log = JSONLinesLog(tmp_path / "log.jsonl")
    log.on_fit_start(epochs=1, max_steps=None, steps_per_epoch=None)
    whole, log._file = log._file, Cutting(log._file)
    log.on_epoch_end(1)
    log._file = whole

    log.on_epoch_end(2)
    log.on_fit_end(None)

    lines = log.path.read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines[:1] + lines[2:]] == ["fit_start", "epoch_end", "fit_end"]


class Cutting:
    """A file on a disk with room for seven bytes."""

    def __init__(self, file):
        self.file = file

    def write(self, data):
        return self.file.write(data[:7])


def test_handler_that_fails_ends_no_training():
    class Broken(logging.Handler):
        def emit(self, record):
            raise ConnectionError("the collector is gone")

    handler = Broken()
    logging.getLogger("autoaccum").addHandler(handler)
    try:
        result = autoaccum.fit(
            nn.Linear(4, 2), [(torch.randn(4, 4), torch.randint(2, (4,)))] * 2, 4, device="cpu", progress="lines"
        )
    finally:
        logging.getLogger("autoaccum").removeHandler(handler)

    assert result.steps == 2
