"""The orchestration of benchmarks/gpu.py, with parts that only pretend: what one does must not touch the others.

What the parts find takes a card; that their files can be imported and keep their promises to each other does not.
"""

import importlib.util
import json
import sys
import time
from pathlib import Path

import pytest
import torch

from folders import ROOT

BENCHMARKS = ROOT / "benchmarks"

ENTRY = (
    "import argparse, json, os, pathlib, sys, time\n"
    "options = argparse.ArgumentParser()\n"
    "[options.add_argument(name) for name in ('--out', '--device', '--budget')]\n"
    "out = pathlib.Path(options.parse_args().out)\n"
    "row = {'what': 'a thing', 'found': 'a | b', 'ok': True}\n"
    "tell = lambda finished=True, ok=True: out.write_text(json.dumps(\n"
    "    {'rows': [row | {'ok': ok}], 'data': {}, 'error': None, 'finished': finished}))\n"
)


def load(name):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield load("gpu")
    for name in set(sys.modules) - before:
        if name.startswith("gpu"):
            del sys.modules[name]


@pytest.fixture
def run(gpu, tmp_path):
    """Runs parts whose programs are given as source; returns the exit code and the files that were written."""

    def run_parts(budget_s=30.0, **sources):
        parts = []
        for name, (source, part_s) in sources.items():
            (tmp_path / f"{name}.py").write_text(ENTRY + source)
            parts.append(gpu.Part(name, f"The part {name}", f"{name}.py", part_s))
        arguments = ["--device", "cpu", "--out", str(tmp_path / "out"), "--scripts", str(tmp_path)]
        options, _ = gpu.parse([*arguments, "--budget", str(budget_s)])
        code = gpu.run({"name": "NVIDIA Test (1.5)", "versions": {}}, parts, options)
        written = tmp_path / "out" / "gpu-NVIDIA-Test-1.5"
        return code, json.loads(Path(f"{written}.json").read_text()), Path(f"{written}.md").read_text()

    return run_parts


def test_part_that_hangs_or_crashes_keeps_what_it_had_and_does_not_stop_the_next(run):
    code, record, table = run(
        budget_s=90.0,
        hangs=("tell(False); time.sleep(60)", 3),
        crashes=("tell(False); os.kill(os.getpid(), 11)", 20),
        fails=("raise SystemExit(3)", 20),
        good=("tell()", 20),
    )

    parts = record["parts"]
    assert code == 1
    assert parts["hangs"]["status"] == "stopped after 3 s"
    assert parts["hangs"]["rows"][0]["what"] == "a thing"
    assert parts["crashes"]["status"] == "killed by signal 11"
    assert parts["fails"]["status"] == "failed with code 3"
    assert parts["good"]["status"] == "done"
    assert "| **good** | The part good | done" in table
    assert "a \\| b" in table


def test_what_a_hanging_part_started_is_ended_with_it(run, tmp_path):
    source = (
        "import subprocess; child = subprocess.Popen(['sleep', '60']); "
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid)); time.sleep(60)"
    )
    run(hangs=(source, 3))

    state = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    deadline = time.monotonic() + 60
    while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_files_are_written_after_each_part(run, tmp_path):
    look = (
        f"found = pathlib.Path({str(tmp_path / 'out' / 'gpu-NVIDIA-Test-1.5.json')!r}).exists(); assert found; tell()"
    )
    code, record, _ = run(first=("tell()", 20), second=(look, 20))

    assert code == 0
    assert record["parts"]["second"]["status"] == "done"


def test_parts_beyond_the_time_for_all_are_told_as_not_run(run):
    code, record, _ = run(budget_s=1.0, late=("tell()", 20))

    assert code == 1
    assert record["parts"]["late"]["status"] == "not run: the time is over"


def test_finding_that_breaks_a_promise_fails_the_run_and_shows_the_log(run):
    code, record, table = run(wrong=("print('the log'); tell(ok=False)", 20))

    assert code == 1
    assert record["parts"]["wrong"]["log"] == ["the log"]
    assert "| a thing | a \\| b | NO |" in table


def test_without_a_card_it_says_so_and_runs_nothing(gpu, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu, "ask_what_there_is", lambda: {"missing": [], "missing_optional": [], "available": False})

    code = gpu.main(["--out", str(tmp_path / "out")])

    assert code == 0
    assert "there is no CUDA card here: nothing was run" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_missing_package_is_named_and_nothing_is_run(gpu, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu, "ask_what_there_is", lambda: {"missing": ["optree"], "missing_optional": []})

    assert gpu.main(["--out", str(tmp_path / "out")]) == 2
    assert "optree" in capsys.readouterr().out


def test_what_there_is_is_described_without_a_card(gpu):
    common = sys.modules["gpu_common"]

    found = common.describe()

    assert found["missing"] == []
    assert found["available"] is torch.cuda.is_available()
    assert found["versions"]["torch"]


def test_every_part_has_its_program_and_all_fit_into_eight_minutes(gpu):
    assert all((BENCHMARKS / part.script).exists() for part in gpu.PARTS)
    assert gpu.parse([])[0].budget < 8 * 60


@pytest.mark.parametrize("truth", [33, 100, 101, 104, 140, 700])
def test_bracket_around_the_truth_closes(gpu, truth):
    probe = load("gpu_probe")

    low, high, _ = probe.bracket(
        100, lambda sizes: {n: n <= truth for n in sizes}, at_once=6, left_s=lambda: 100.0, least_s=1.0
    )

    assert (low, high) == (truth, truth + 1)
