"""An examination as a document and as a table, and the command that prints them."""

import json

import torch
from typer.testing import CliRunner

from autoaccum._cli.app import app
from autoaccum._doctor import examine
from autoaccum._doctor.examination import Examination
from autoaccum._doctor.findings import Fact
from autoaccum._doctor.text import table_of
from autoaccum._report.table import plain_text


def test_command_prints_each_fact_once():
    done = CliRunner().invoke(app, ["doctor"])

    assert done.exit_code == 0
    assert [line for line in done.stdout.splitlines() if line and not line.startswith(" ")][:4] == [
        "Installation",
        "Machine",
        "Limits",
        "Devices",
    ]
    assert torch.__version__ in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_document_has_an_object_for_each_area_and_the_problems():
    done = CliRunner().invoke(app, ["doctor", "--json"])

    document = json.loads(done.stdout)
    assert list(document) == ["installation", "machine", "limits", "devices", "problems"]
    assert document["limits"]["free for training"] > 0
    assert document == {**examine().to_dict(), "limits": document["limits"], "machine": document["machine"]}


def test_table_ends_with_the_problems_or_says_that_there_are_none():
    areas = {"machine": (Fact("cores", "2", 2),)}

    fine = plain_text(table_of(Examination(areas, ())))
    not_fine = plain_text(table_of(Examination(areas, ("the one", "the other"))))

    assert fine.splitlines() == ["Machine", "  cores  2", "", "Nothing was found that does not fit together."]
    assert not_fine.splitlines()[3:] == ["", "What does not fit together", "  - the one", "  - the other"]


def test_nothing_is_initialised():
    examine()

    assert not torch.cuda.is_initialized()
