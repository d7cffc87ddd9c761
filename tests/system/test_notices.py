"""What was chosen for the user is said once."""

import logging
import subprocess
import sys

import pytest

from autoaccum._system.notices import Notices


def test_notice_goes_to_stderr_and_nothing_to_stdout(capsys):
    Notices().say("device: cpu")

    assert capsys.readouterr() == ("", "autoaccum: device: cpu\n")


@pytest.mark.parametrize("make", [lambda: "device: cpu", lambda: "device: {}".format("cpu")], ids=["same", "equal"])
def test_same_text_is_said_once(make, capsys):
    notices = Notices()
    notices.say(make())

    notices.say(make())

    assert capsys.readouterr().err.count("device: cpu") == 1


def test_second_text_under_the_same_key_is_not_said(capsys):
    notices = Notices()
    notices.say("loss: mse", key="loss")

    notices.say("loss: cross entropy", key="loss")

    assert "cross entropy" not in capsys.readouterr().err
    assert notices.texts == ("loss: mse",)


def test_each_object_says_a_thing_anew(capsys):
    for _ in range(2):
        Notices().say("device: cpu")

    assert capsys.readouterr().err.count("device: cpu") == 2


def test_silent_notices_keep_what_they_do_not_print(capsys):
    notices = Notices(silent=True)

    notices.say("device: cpu")

    assert notices.texts == ("device: cpu",)
    assert capsys.readouterr() == ("", "")


def test_notices_are_logged_under_the_name_of_the_package(caplog):
    Notices().say("device: cpu")

    assert caplog.record_tuples == [("autoaccum", logging.INFO, "device: cpu")]


def test_notices_are_silenced_by_the_level_of_the_logger(caplog, capsys):
    logging.getLogger("autoaccum").setLevel(logging.WARNING)

    Notices().say("device: cpu")

    assert not caplog.records
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
