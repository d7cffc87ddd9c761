"""What scripts/gpu_results.py makes of a run of benchmarks/gpu.py."""

import copy
import importlib.util
import json
import shutil

import pytest

from support.processes.folders import ROOT

_SPEC = importlib.util.spec_from_file_location("gpu_results", ROOT / "scripts" / "gpu_results.py")
gpu_results = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(gpu_results)


def row_of(what, found="its result", ok=True, **data):
    return {"what": what, "found": found, "ok": ok, "data": data}


def job(what, allocated, reserved):
    real = {"allocated_bytes": 2**30, "reserved_bytes": 2**30}
    said = {"allocated_bytes": allocated * 2**30, "reserved_bytes": reserved * 2**30}
    return row_of(what, real=real, predicted=said | {"samples": 16, "uncertainty": 0.048})


def part(title, *rows, status="done", **more):
    return {"title": title, "status": status, "rows": list(rows), "log": ["/somewhere/a.py: line"]} | more


SKIPPED = row_of("GRU", ok=None) | {"skipped": "the time is over"}
ALONE = part("Device lost", row_of("fit", "died: SIGABRT in /somewhere/b.py", ok=False))
JOBS = (job("near", 1.01, 0.99), job("LoRA", 1.1, 1.02), job("T5", 0.65, 0.64))
SAMPLE = {
    "written": "2026-11-26T10:00:00+00:00",
    "device": "cuda",
    "tiny": False,
    "machine": {
        "gpu": "NVIDIA H200", "driver": "580.1", "cuda": "13.0", "packages": {"torch": "2.11.0"},
        "autoaccum_from": "/somewhere/autoaccum",
    },
    "parts": {
        "lost": ALONE,
        "overhead": part("Overhead", row_of("Runner, 6 tensors, about 1 ms", "ratio 1.1", ok=None), row_of("other")),
        "predictions": part("Predicted", *JOBS, SKIPPED),
    },
}  # fmt: skip


@pytest.fixture
def root(tmp_path):
    for page in gpu_results.STATUS:
        (tmp_path / page).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(ROOT / page, tmp_path / page)
    return tmp_path


@pytest.fixture
def folder(tmp_path):
    def make(name="run", run=SAMPLE):
        at = tmp_path / name
        at.mkdir()
        (at / "gpu.json").write_text(json.dumps(run))
        return str(at)

    return make


def other(**changes):
    return copy.deepcopy(SAMPLE) | changes


def record(root):
    return json.loads((root / "benchmarks" / "results" / "gpu-h200.json").read_text())


def test_record_has_rows_and_machine_but_no_logs_and_no_paths(root, folder):
    assert gpu_results.main([folder()], root) == 0

    kept = record(root)
    assert kept["machine"]["driver"] == "580.1"
    assert kept["parts"]["predictions"]["rows"][0]["data"]["real"]["reserved_bytes"] == 2**30
    assert not [word for word in ("/somewhere", "log", "autoaccum_from") if word in json.dumps(kept)]


def test_page_has_what_decides_and_what_failed(root, folder):
    gpu_results.main([folder()], root)

    page = (root / "docs" / "dev" / "gpu.md").read_text()
    assert "| Device lost | 0 of 1 |  |" in page
    assert "| Overhead | 1 of 1 | Runner, 6 tensors, about 1 ms: ratio 1.1 |" in page
    assert "| LoRA | 16 | 1.00 | +10.0% | 1.00 | +2.0% | 4.8% |" in page
    assert "| near |" not in page
    assert (
        "**Allocated**, 3 jobs: median error 10.0%, 1 within 5%; most over +10.0% (LoRA), most under -35.0% (T5)."
        in page
    )
    assert "more than predicted with its margin**: T5." in page
    failed = page.split("### What failed, and what was skipped")[1]
    assert "- lost: fit: died: SIGABRT in b.py" in failed
    assert "- predictions: skipped (the time is over): GRU" in failed


def test_pages_name_the_gpu_and_the_date_or_say_that_there_was_no_run(root, folder):
    gpu_results.main([], root)
    assert all("**Not yet run on a GPU.**" in (root / page).read_text() for page in gpu_results.STATUS)

    gpu_results.main([folder()], root)

    versions = "2026-11-26, driver 580.1, CUDA 13.0, PyTorch 2.11.0"
    said = f"Tested on an NVIDIA H200 ({versions}): [4 of 5 tests and checks passed]"
    assert all(said in (root / page).read_text() for page in gpu_results.STATUS)
    assert "passed](docs/dev/gpu.md)" in (root / "README.md").read_text()
    assert "passed](dev/gpu.md)" in (root / "docs" / "benchmarks.md").read_text()


def test_later_folder_replaces_parts_that_it_did_not_skip(root, folder):
    later = other(written="2026-12-01T00:00:00+00:00")
    later["parts"]["predictions"] |= {"status": "skipped", "skipped": "the time is over", "rows": []}
    later["parts"]["overhead"]["rows"] = [SKIPPED]
    later["parts"]["lost"]["rows"][0] |= {"ok": True, "found": "DeviceLostError"}

    gpu_results.main([folder("one"), folder("two", later)], root)

    kept, page = record(root), (root / "docs" / "dev" / "gpu.md").read_text()
    assert kept["parts"]["lost"]["rows"][0]["found"] == "DeviceLostError"
    assert "made" not in kept["parts"]["lost"]
    assert kept["parts"]["predictions"]["rows"]
    assert len(kept["parts"]["overhead"]["rows"]) == 2
    assert "| Predicted (PyTorch 2.11.0) |" in page
    assert "## NVIDIA H200, 2026-12-01" in page


def test_check_names_pages_that_are_out_of_date_and_writes_none(root, folder, capsys):
    gpu_results.main([folder()], root)
    assert gpu_results.main(["--check"], root) == 0
    page = root / "docs" / "benchmarks.md"
    page.write_text(changed := page.read_text().replace("2026-11-26", "2026-11-27"))
    capsys.readouterr()

    assert gpu_results.main(["--check"], root) == 1

    assert capsys.readouterr().out == "docs/benchmarks.md: out of date; run scripts/gpu_results.py\n"
    assert page.read_text() == changed


def test_pages_here_say_what_the_results_here_say():
    """If not, `python scripts/gpu_results.py` writes them."""
    assert gpu_results.main(["--check"]) == 0


def test_tests_are_counted_one_by_one(root, folder):
    tests = part(
        "Survival", row_of("tests", "70 passed, 1 not ended, 70 on the GPU", ok=False), row_of("one", ok=False)
    )

    gpu_results.main([folder(run=other(parts={"survival": tests}))], root)

    assert "[70 of 71 tests and checks passed]" in (root / "README.md").read_text()
    assert "| Survival | 70 of 71 |" in (root / gpu_results.TABLES).read_text()
