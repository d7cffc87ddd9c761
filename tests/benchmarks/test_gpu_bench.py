"""The orchestration of benchmarks/gpu.py, with parts that only pretend: what one does must not touch the others."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.processes.folders import ROOT

pytestmark = pytest.mark.slow  # of measurements, by real processes

BENCHMARKS = ROOT / "benchmarks"
HANG = "; time.sleep(600)"
PROGRAM = """
import argparse, json, os, pathlib, subprocess, time
parser = argparse.ArgumentParser()
[parser.add_argument(f"--{name}", required=True) for name in "part result budget device out machine".split()]
options = parser.parse_args()
here, out, result = pathlib.Path(__file__).parent, pathlib.Path(options.out), pathlib.Path(options.result)
def tell(finished=True, data=(), **row):
    row = {"what": "a thing", "found": "its result", "ok": True, "data": {}} | row
    result.write_text(json.dumps({"finished": finished, "rows": [row], "data": dict(data), "error": None}))
exec((here / options.part).read_text())
"""


def load(name, monkeypatch):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # tests/gpu may have the name, too
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return load("gpu", monkeypatch)


@pytest.fixture
def part(gpu, tmp_path):
    """Makes a part of a source. Its name is one of `STAGES`, as the files of a run have no other."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def make(name, source, limit_s=60, **needs):
        (tmp_path / name).write_text(source)
        return gpu.Part(name, "its title", limit_s, **needs)

    return make


@pytest.fixture
def run(gpu, part, tmp_path):
    """Runs the part "machine", which finds this machine, and stages; returns the exit code and the records."""

    def run_stages(*stages, device="cpu", budget_s=120, **machine):
        arguments = ["--device", device, "--budget", str(budget_s), "--out", str(tmp_path / "out")]
        options, _ = gpu.parse([*arguments, "--program", str(tmp_path / "program.py")])
        options.patience = 1
        (tmp_path / "scratch").mkdir()
        first = part("machine", f"tell(data={machine})")
        code = gpu.Run(options, [[[first]], *stages], tmp_path / "scratch").run()
        return code, json.loads((tmp_path / "out" / "gpu.json").read_text())["parts"]

    return run_stages


def wait_for(done):
    deadline = time.monotonic() + 60
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert done()


def wait_for_end(pid):
    def has_ended():
        try:
            return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
        except OSError:
            return True

    wait_for(has_ended)


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("tell(False)" + HANG, "stopped after 5 s"),
        ("tell(False); os.kill(os.getpid(), 11)", "killed by signal 11"),
        ("tell(); raise SystemExit(7)", "failed with code 7"),
        ("tell(False)", "failed with code 0"),
    ],
)
def test_part_that_does_not_end_well_keeps_its_findings_and_does_not_stop_the_next(run, part, source, status):
    lane = [part("survival", source, limit_s=5), part("overhead", "tell()")]
    code, parts = run([lane], budget_s=60)

    assert (code, parts["survival"]["status"], parts["overhead"]["status"]) == (1, status, "done")
    assert parts["survival"]["rows"][0]["found"] == "its result"


def test_parts_for_which_no_time_is_left_say_so(run, gpu, part):
    lane = [part("survival", "time.sleep(3); tell()"), part("overhead", "tell()"), part("tests", "tell()")]
    code, parts = run([lane], budget_s=gpu._LEAST_S + 3)

    assert (code, parts["survival"]["status"]) == (3, "done")
    assert [parts[name].get("skipped") for name in ("overhead", "tests")] == ["the time is over"] * 2


def test_finding_that_breaks_a_promise_fails_the_run_and_shows_the_end_of_the_log(run, part, capsys):
    code, parts = run([[part("survival", "print(*range(99), 'the end', sep='\\n'); tell(ok=False)")]])

    assert (code, parts["survival"]["log"][-1]) == (1, "the end")
    assert "> the end" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("device", "needs", "source", "skipped", "expected"),
    [
        ("cuda", {"needs": ("there",), "needs_gib": 16}, "tell()", None, 0),
        ("cuda", {"needs_gib": 40}, "tell()", "needs a GPU of 40 GiB, and this one has 16.0", 3),
        ("cuda", {}, "tell(ok=None, skipped='no GPU')", None, 3),
        ("cpu", {"needs": ("there", "lacking")}, "tell()", "missing: lacking", 3),
        ("cpu", {"needs_gib": 40}, "tell(ok=None, skipped='no GPU')", None, 0),
        ("cpu", {}, "tell(ok=None, skipped='the time is over')", None, 3),
    ],
)
def test_reason_to_skip_is_told_and_with_device_cpu_no_gpu_is_excused(
    run, part, device, needs, source, skipped, expected
):
    machine = {"gpu": "NVIDIA", "total_bytes": 16 * 2**30, "packages": {"there": "1.0", "lacking": None}}
    code, parts = run([[part("survival", source, **needs)]], device=device, **machine)

    assert (code, parts["survival"].get("skipped")) == (expected, skipped)


@pytest.mark.parametrize("signals", [(signal.SIGTERM,), (signal.SIGHUP,), (signal.SIGINT, signal.SIGTERM)])
def test_signals_keep_what_was_found_and_end_what_runs(part, tmp_path, signals):
    pid = tmp_path / "pid"
    part("machine", "tell()")
    part("transfer", f"tell(False); (here / 'pid').write_text(str(os.getpid())){HANG}")
    options = ["--device", "cpu", "--parts", "transfer", "--program", tmp_path / "program.py", "--out", tmp_path]
    with subprocess.Popen(
        [sys.executable, BENCHMARKS / "gpu.py", *options], env=os.environ | {"TMPDIR": str(tmp_path)}
    ) as process:
        try:
            wait_for(lambda: pid.exists() and pid.read_text())
        finally:
            for number in signals:
                process.send_signal(number)
                time.sleep(0.002)

    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert (process.returncode, parts["machine"]["status"]) == (128 + signals[0], "done")
    assert parts["transfer"]["rows"][0]["found"] == "its result"
    wait_for_end(pid.read_text())


def test_limits_fit_the_time_for_all_which_is_below_eight_minutes(gpu):
    assert gpu.critical_path_s(gpu.STAGES) <= gpu.parse([])[0].budget < 8 * 60


def test_test_that_ends_the_process_is_named_and_hides_no_other(gpu, tmp_path, monkeypatch):
    cases = load("gpu_cases", monkeypatch)
    source = "import os\ndef test_one(): pass\ndef test_two(): assert 1 == 2\ndef test_three(): os._exit(0)\n"
    (tmp_path / "test_it.py").write_text(source)
    findings = gpu.Findings(tmp_path / "result.json", 60, "cpu", tiny=True)

    cases._pytest(findings, str(tmp_path / "test_it.py"))

    tests, two, three = findings.record["rows"]
    assert (tests["found"], tests["ok"]) == ("1 passed, 1 failed, 1 not ended", False)
    assert (two["what"].split("::")[1], two["found"]) == ("test_two", "E   assert 1 == 2")
    assert (three["what"].split("::")[1], three["found"]) == ("test_three", "not ended")


def test_every_part_has_its_function(gpu, monkeypatch):
    cases = load("gpu_cases", monkeypatch)

    assert [one.name for one in gpu.parts_of() if not callable(getattr(cases, one.name, None))] == []
