"""What was chosen for the user is said once."""

import subprocess
import sys

import pytest

from autoaccum._system.notices import Notices


def test_second_text_under_the_same_key_is_not_said(capsys):
    notices = Notices()
    notices.say("loss: mse", key="loss")

    notices.say("loss: cross entropy", key="loss")

    assert "cross entropy" not in capsys.readouterr().err
    assert notices.texts == ("loss: mse",)


def test_silent_notices_keep_what_they_do_not_print(capsys):
    notices = Notices(silent=True)

    notices.say("device: cpu")

    assert notices.texts == ("device: cpu",)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("pass", "autoaccum: device: cpu\n"),
        ("logging.getLogger('autoaccum').setLevel('WARNING')", ""),
        ("logging.basicConfig(level='INFO', format='%(name)s %(message)s')", "autoaccum device: cpu\n"),
        ("logging.basicConfig()", ""),
    ],
    ids=["nothing set up", "silenced", "handled", "handled from warnings on"],
)
def test_notices_go_to_stderr_where_nobody_handles_them(setting, expected):
    code = f"import logging\nfrom autoaccum._system.notices import Notices\n{setting}\nNotices().say('device: cpu')"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert (done.stdout, done.stderr) == ("", expected)
