"""What was chosen for the user is said once."""

import logging
import subprocess

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum._system.notices import Notices
from support.processes import fork_server


def test_second_text_under_the_same_key_is_not_said(capsys):
    notices = Notices()
    notices.say("loss: mse", key="loss")

    notices.say("loss: cross entropy", key="loss")

    assert "cross entropy" not in capsys.readouterr().err
    assert notices.texts == ("loss: mse",)


def test_nan_is_a_warning_for_whoever_handles_the_lines(caplog):
    windows = [(torch.randn(4, 4), torch.randint(2, (4,))) for _ in range(4)]
    windows[2] = (windows[2][0] * float("nan"), windows[2][1])

    with caplog.at_level(logging.WARNING, logger="autoaccum"):
        autoaccum.fit(nn.Linear(4, 2), windows, 4, device="cpu", progress=False)

    assert [record.levelno for record in caplog.records if "not finite" in record.getMessage()] == [logging.WARNING]


LINES = ["epoch 1 done", "done: 3 optimizer steps"]


@pytest.mark.parametrize(
    ("setting", "on_stdout", "on_stderr"),
    [
        ("", [], [*LINES, "LossWarning"]),
        ("progress = False", [], ["LossWarning"]),
        ("logging.basicConfig(level='INFO', stream=sys.stdout)", LINES, ["LossWarning"]),
        ("logging.basicConfig()", [], [*LINES, "LossWarning"]),  # whose logger takes only warnings
        ("logging.basicConfig(level='INFO', handlers=[errors()])", [], [*LINES, "LossWarning"]),
        (
            "logging.basicConfig(level='INFO', handlers=[errors(), logging.StreamHandler(sys.stdout)])",
            LINES,
            ["LossWarning"],
        ),
        ("logging.getLogger('autoaccum').addHandler(errors())", [], [*LINES, "LossWarning"]),
        ("logging.disable()", [], ["LossWarning"]),
        ("logging.getLogger('autoaccum').setLevel('ERROR'); warnings.simplefilter('ignore')", [], []),
    ],
)
def test_lines_of_fit_go_to_handlers_that_take_them_and_else_to_stderr_and_warnings_of_a_loss_where_warnings_do(
    setting, on_stdout, on_stderr
):
    code = f"""
import logging, sys, warnings, torch, autoaccum
progress = "lines"
def errors():
    handler = logging.StreamHandler()
    handler.setLevel("ERROR")
    return handler
{setting}
def loss(model, batch):
    outputs = model(batch[0])
    return torch.nn.functional.mse_loss(outputs, batch[1], reduction="sum") + 0.1 * outputs.mean(0).square().sum()
batches = [(torch.randn(8, 3), torch.randn(8, 2))] * 3
result = autoaccum.fit(torch.nn.Linear(3, 2), batches, 8, loss=[loss], device="cpu", micro_batch=4, progress=progress)
print("warnings:", len(result.warnings))
"""
    done = subprocess.run([*fork_server.python(), "-c", code], capture_output=True, text=True, check=True)

    for stream, expected in [(done.stdout, on_stdout), (done.stderr, on_stderr)]:
        assert [text for text in (*LINES, "LossWarning") if text in stream] == expected
        assert all(stream.count(text) == 1 for text in expected if text in LINES)
    assert done.stdout.splitlines()[-1] == "warnings: 1"
