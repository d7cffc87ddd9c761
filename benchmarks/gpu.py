"""Runs what only a GPU can show, in one command: survival, predictions, overhead, the probe against the truth.

    python benchmarks/gpu.py [--out FOLDER] [--budget 440] [--parts survival,overhead] [--device cpu --tiny]

autoaccum and what it needs must be installed; nothing is downloaded. Each part is a process of its own with a time
limit. It writes its findings as it makes them, so a part that hangs, dies or breaks the GPU keeps them and does not
stop the others. FOLDER receives gpu.json (all findings, written anew after each part) and gpu.log (all output).
`python scripts/gpu_results.py FOLDER` turns them into benchmarks/results/gpu-NAME.json and the tables of the docs.

With `--device cpu --tiny` the same program runs small sizes without a GPU: everything except what only CUDA has.

Exit code: 0, every part was completed and found what is promised; 1, a part failed or a promise was broken; 2, an
option cannot be used; 3, a part was skipped (no GPU, a GPU too small, a package missing, no time left) and nothing
failed; 128 and the signal's number, it was stopped. With `--device cpu` a part that needs CUDA may be skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGET_S = 440.0
NO_GPU, NO_TIME = "no GPU", "the time is over"
_TAIL_LINES = 40
# Without a GPU the code is tried, not the time.
_CPU_PATIENCE = 6.0
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_COMPARES_BITS = ("survival", "tests", "sharded", "neighbour")
# With less time left a part is not started: importing torch and making a context takes much of it.
_LEAST_S = 12.0
# A part is told that its time is over this long before it is killed.
_GRACE_S = 4.0


@dataclass(frozen=True)
class Part:
    """One part of the run.

    Attributes:
        name: As in `--parts`; `gpu_cases.py` has a function of this name.
        title: Its subject.
        limit_s: Its time limit in seconds.
        needs: Import names of packages without which it is skipped.
        needs_gib: GPU memory without which it is skipped.
    """

    name: str
    title: str
    limit_s: float
    needs: tuple[str, ...] = ()
    needs_gib: float = 1.0


_PYTEST = ("pytest", "hypothesis")
# Stages run one after another. The lanes of a stage run side by side, the parts of a lane one after another.
STAGES: tuple[tuple[tuple[Part, ...], ...], ...] = (
    ((Part("machine", "Versions, CUDA's context, cuBLAS's workspace", 15),),),
    (
        (Part("survival", "Memory runs out for real; the state is compared bit for bit", 130, _PYTEST, 12),),
        (Part("tests", "The other tests of the GPU, and the contract of the CUDA backend", 130, _PYTEST, 12),),
        (Part("sharded", "FSDP2 in a world of one: the gradient, sizes, lack of memory before a pass", 60, (), 6),),
        (Part("predictions", "Predicted memory against the real", 130, ("transformers", "torchvision", "peft"), 40),),
    ),
    ((Part("neighbour", "A neighbour takes the memory and gives it back", 25, _PYTEST, 4),),),
    ((Part("overhead", "Runner and Accumulator beside the loop by hand", 35),),),
    ((Part("transfer", "Transfers beside computing", 16),),),
    ((Part("throughput", "GPT-2: tokens a second", 50, ("transformers",), 40),),),
    ((Part("probe", "The probe against the truth", 34, ("transformers", "torchvision"), 40),),),
    ((Part("finders", "Other finders", 28, ("lightning", "accelerate", "transformers", "torchvision"), 16),),),
    ((Part("saving", "save_memory= with peaks and seconds", 88, ("transformers",), 40),),),
    ((Part("resnet101", "ResNet-101, target batch 100 where 50 fit", 18, ("torchvision",), 16),),),
)


def parts_of(stages=STAGES):
    return [part for stage in stages for lane in stage for part in lane]


def critical_path_s(stages=STAGES):
    """Return the seconds that all stages take if every part uses its limit."""
    return sum(max((sum(part.limit_s for part in lane) for lane in stage), default=0.0) for stage in stages)


# --- a part, in its own process ---------------------------------------------------------------------------------------


class Findings:
    """The findings of a part, written to its file after each, so that a part that is killed keeps them.

    Args:
        path: The file.
        limit_s: The part's time limit in seconds.
        device: "cuda" or "cpu".
        tiny: Whether sizes are small.
        machine: What the part "machine" found.
        folder: Where the part may leave files.
    """

    def __init__(self, path, limit_s, device, *, tiny=False, machine=None, folder=None):
        self._path = Path(path)
        self._ends = time.monotonic() + limit_s
        self.device = device
        self.tiny = tiny
        self.machine = machine or {}
        self.folder = Path(folder or self._path.parent)
        self.record = {"finished": False, "rows": [], "data": {}, "error": None}
        self._write()

    @property
    def on_gpu(self):
        """Whether there is CUDA."""
        return self.device == "cuda"

    def left_s(self):
        """Return the seconds left."""
        return self._ends - time.monotonic()

    def add(self, what, found, *, ok=None, **data):
        """Record one finding.

        Args:
            what: Its subject.
            found: The result, as text.
            ok: Whether it is as promised; None if nothing was promised.
            data: The result, as data.
        """
        self.record["rows"].append({"what": what, "found": str(found), "ok": ok, "data": data})
        print(f"{what}: {found} [{ {True: 'ok', False: 'NOT AS PROMISED', None: '-'}[ok] }]", flush=True)
        self._write()

    def skip(self, what, why):
        """Record a finding that could not be made."""
        self.record["rows"].append({"what": what, "found": f"skipped: {why}", "ok": None, "skipped": why, "data": {}})
        print(f"{what}: skipped: {why}", flush=True)
        self._write()

    def keep(self, **data):
        """Record data of the whole part."""
        self.record["data"] |= data
        self._write()

    def end(self, error=None):
        """Record that the part is over, or the error that ended it."""
        self.record |= {"finished": error is None, "error": error}
        self._write()

    def _write(self):
        replace_text(self._path, json.dumps(self.record, indent=1, default=str))


def run_inside(options):
    """Run one part in this process, which ends also where gpu.py was killed."""
    signal.alarm(math.ceil(options.budget + 2 * _GRACE_S))
    findings = Findings(
        options.result,
        options.budget,
        options.device,
        tiny=options.tiny,
        machine=json.loads(options.machine),
        folder=options.out,
    )
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import gpu_cases  # noqa: PLC0415 - it imports torch

        getattr(gpu_cases, options.part)(findings)
        findings.end()
    except BaseException:  # noqa: BLE001 - however it ends, what was found is kept
        traceback.print_exc()
        findings.end(traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    # A broken device may disturb the interpreter's exit, which no longer matters.
    os._exit(0 if findings.record["finished"] else 1)


# --- all parts --------------------------------------------------------------------------------------------------------


class Run:
    """Runs the parts and writes the files."""

    def __init__(self, options, stages, scratch):
        self._options = options
        self._stages = stages
        self._scratch = Path(scratch)
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._machine = {}
        self._records = {}
        self._children = {}
        self._failure = None
        self._is_stopped = False
        for name in ("gpu.json", "gpu.log"):
            (options.out / name).unlink(missing_ok=True)  # of an earlier run

    def run(self):
        """Run all stages; return the exit code."""
        for index, stage in enumerate(self._stages):
            # Time that earlier parts left over, or that parts not asked for would have taken, goes to those to come.
            stretch = max(1.0, self._left_s() / (critical_path_s(self._stages[index:]) or math.inf))
            lanes = [threading.Thread(target=self._lane, args=(lane, stretch)) for lane in stage]
            for lane in lanes:
                lane.start()
            for lane in lanes:
                lane.join()
        return self._code()

    def stop(self):
        """End the parts that run, begin no other, and keep what they found."""
        with self._lock:
            self._is_stopped = True
            for name, process in self._children.items():
                _kill(process)
                part = next(part for part in parts_of(self._stages) if part.name == name)
                about = {"title": part.title, "limit_s": part.limit_s, "status": "stopped from outside", "seconds": 0.0}
                self._records[name] = self._read(part) | about
        self._write()

    def _lane(self, lane, stretch):
        try:
            for part in lane:
                why = self._why_not(part)
                began = time.monotonic()
                record = (
                    {"status": "skipped", "skipped": why, "rows": []}
                    if why
                    else self._run(part, part.limit_s * stretch)
                )
                record |= {"title": part.title, "limit_s": part.limit_s, "seconds": round(time.monotonic() - began, 1)}
                with self._lock:
                    if self._is_stopped:
                        return
                    self._records[part.name] = record
                self._tell(part, record)
                self._write()
        except Exception:  # noqa: BLE001 - of the file system, mostly; the other lanes go on
            self._failure = traceback.format_exc()
            print(self._failure, file=sys.stderr, flush=True)

    def _why_not(self, part):
        """Return why a part cannot run; None if it can."""
        why = None if part.name == "machine" else self._lacks(part)
        return NO_TIME if why is None and self._left_s() < _LEAST_S else why

    def _lacks(self, part):
        if self._records["machine"]["status"] != "done":
            return "the part machine failed"
        on_gpu, gib = self._options.device == "cuda", self._machine.get("total_bytes", 0) / 2**30
        if on_gpu and not self._machine.get("gpu"):
            return NO_GPU
        lacking = [name for name in part.needs if not self._machine.get("packages", {}).get(name)]
        if lacking:
            return f"missing: {', '.join(lacking)}"
        if on_gpu and gib < part.needs_gib:
            return f"needs a GPU of {part.needs_gib:.0f} GiB, and this one has {gib:.1f}"
        return None

    def _run(self, part, limit_s):
        limit_s = min(limit_s, self._left_s())
        command = [sys.executable, str(self._options.program), "--part", part.name, "--result", self._result(part)]
        command += ["--budget", f"{max(1.0, limit_s - _GRACE_S):.0f}", "--device", self._options.device]
        command += ["--out", str(self._options.out), "--machine", json.dumps(self._machine)]
        command += ["--tiny"] if self._options.tiny else []
        print(f"{part.name}: {part.title} (at most {limit_s:.0f} s) ...\n", end="", flush=True)
        log = self._scratch / f"{part.name}.log"
        with log.open("w") as output:
            with self._lock:
                if self._is_stopped:
                    return self._read(part) | {"status": "stopped from outside"}
                process = self._children[part.name] = subprocess.Popen(
                    [str(word) for word in command],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env=_environment(self._scratch / part.name),
                    start_new_session=True,
                    cwd=ROOT,
                )
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _kill(process)
                with self._lock:
                    self._children.pop(part.name, None)
        record = self._read(part)
        if part.name == "machine":
            self._machine = record["data"]
        if code is None:
            record["status"] = f"stopped after {limit_s:.0f} s"
        elif code < 0:
            record["status"] = f"killed by signal {-code}"
        else:
            record["status"] = "done" if code == 0 and record["finished"] else f"failed with code {code}"
        if not _is_good(record):
            record["log"] = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return record

    def _read(self, part):
        record = {"rows": [], "data": {}, "error": None, "finished": False}
        with contextlib.suppress(OSError, ValueError):
            record |= json.loads(self._result(part).read_text())
        return record

    def _result(self, part):
        return self._scratch / f"{part.name}.json"

    def _left_s(self):
        return self._options.patience * self._options.budget - (time.monotonic() - self._began)

    def _tell(self, part, record):
        reason = f": {record['skipped']}" if record.get("skipped") else ""
        lines = [f"{part.name}: {record['status']}{reason}, {record['seconds']:.0f} s"]
        lines += [f"  {'!!' if r['ok'] is False else '  '} {r['what']}: {r['found']}" for r in record["rows"]]
        lines += [f"     > {line}" for line in record.get("log", ())[-12:]]
        print("\n".join(lines) + "\n", end="", flush=True)  # in one piece, since lanes print side by side

    def _write(self):
        with self._lock:
            record = {
                "written": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
                "seconds": round(time.monotonic() - self._began, 1),
                "device": self._options.device,
                "tiny": self._options.tiny,
                "machine": self._machine,
                "parts": {
                    part.name: self._records[part.name] for part in parts_of(self._stages) if part.name in self._records
                },
            }
            replace_text(self._options.out / "gpu.json", json.dumps(record, indent=1) + "\n")
            logs = sorted(self._scratch.glob("*.log"), key=lambda path: path.stat().st_mtime)
            texts = [f"===== {path.stem}\n{path.read_text(errors='replace')[-400_000:]}" for path in logs]
            replace_text(self._options.out / "gpu.log", "\n".join(texts))

    def _code(self):
        if self._failure or any(
            record["status"] != "skipped" and not _is_good(record) for record in self._records.values()
        ):
            return 1
        return 3 if any(not self._is_excused(why) for record in self._records.values() for why in _skips(record)) else 0

    def _is_excused(self, why):
        return self._options.device == "cpu" and why == NO_GPU


def _skips(record):
    return [why for one in (record, *record["rows"]) if (why := one.get("skipped"))]


def _is_good(record):
    return record["status"] == "done" and all(row["ok"] is not False for row in record["rows"])


def _kill(process):
    """End a part and everything that it started, which must not keep memory of the GPU."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment(scratch):
    return (
        os.environ
        | {
            "AUTOACCUM_CACHE_DIR": str(scratch),  # sizes that an earlier run found must not help this one
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "CUDA_MODULE_LOADING": "LAZY",  # torch sets this itself, and the tests would see the change
            # Asking whether there is a GPU must not make a context that a forked child could not use.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        | ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if scratch.name in _COMPARES_BITS else {})
    )


def replace_text(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_text(text)
    beside.replace(path)


def _seconds(text):
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no time")
    return seconds


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder for the result files")
    parser.add_argument("--budget", type=_seconds, default=BUDGET_S, help="seconds for all parts together")
    parser.add_argument("--parts", default="", help=f"only these: {','.join(part.name for part in parts_of())}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    parser.add_argument("--program", default=__file__, help=argparse.SUPPRESS)  # what runs a part; tests replace it
    for name in ("--part", "--result", "--machine"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.out = options.out.resolve()
    options.patience = _CPU_PATIENCE if options.device == "cpu" else 1.0
    wanted = [name for name in options.parts.split(",") if name]
    unknown = set(wanted) - {part.name for part in parts_of()}
    if unknown:
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    # Without the machine nothing is known about what can run.
    keep = {*wanted, "machine"} if wanted else {part.name for part in parts_of()}
    stages = [[[part for part in lane if part.name in keep] for lane in stage] for stage in STAGES]
    return options, stages


def main(arguments=None):
    options, stages = parse(arguments)
    if options.part:
        run_inside(options)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"gpu.py: --out cannot be made: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="gpu-") as scratch:
        run = Run(options, stages, scratch)

        def stopped(number, _):
            for name in _STOPS:
                signal.signal(name, signal.SIG_IGN)
            run.stop()
            shutil.rmtree(scratch, ignore_errors=True)
            os._exit(128 + number)

        for name in _STOPS:
            signal.signal(name, stopped)
        code = run.run()
    print(f"written: {options.out}/gpu.json")
    return code


if __name__ == "__main__":
    sys.exit(main())
