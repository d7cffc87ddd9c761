"""What scripts/gpu_results.py makes of a run of benchmarks/gpu.py; gpu_sample.json is a part of a real one."""

import copy
import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from folders import ROOT

_SPEC = importlib.util.spec_from_file_location("gpu_results", ROOT / "scripts" / "gpu_results.py")
gpu_results = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(gpu_results)
SAMPLE = json.loads((Path(__file__).parent / "gpu_sample.json").read_text())


@pytest.fixture
def root(tmp_path):
    """A tree with the pages, and no results."""
    for page in gpu_results.STATUS:
        (tmp_path / page).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(ROOT / page, tmp_path / page)
    return tmp_path


@pytest.fixture
def folder(tmp_path):
    """Makes the folder of a run."""

    def make(name="run", run=SAMPLE, allocations=None):
        at = tmp_path / name
        at.mkdir()
        (at / "gpu.json").write_text(run if isinstance(run, str) else json.dumps(run))
        if allocations:
            (at / "allocations.json.gz").write_bytes(allocations)
        return str(at)

    return make


def other(**changes):
    return copy.deepcopy(SAMPLE) | changes


def record(root):
    return json.loads((root / "benchmarks" / "results" / "gpu-h200.json").read_text())


def row(page, first):
    return next(line for line in page.splitlines() if line.startswith(f"| {first} |"))


def test_record_has_rows_and_machine_but_no_logs_and_no_paths(root, folder):
    assert gpu_results.main([folder(allocations=b"all")], root) == 0

    kept = record(root)
    assert kept["machine"]["driver"] == "580.159.04"
    real = SAMPLE["parts"]["predictions"]["rows"][0]["data"]["real"]["reserved_bytes"]
    assert kept["parts"]["predictions"]["rows"][0]["data"]["real"]["reserved_bytes"] == real
    assert "/somewhere" in json.dumps(SAMPLE)
    assert not [word for word in ("/somewhere", "log", "autoaccum_from") if word in json.dumps(kept)]
    assert (root / "benchmarks" / "results" / "gpu-h200-allocations.json.gz").read_bytes() == b"all"


def test_errors_of_predictions_have_both_directions(root, folder):
    gpu_results.main([folder()], root)

    page = (root / "docs" / "dev" / "gpu.md").read_text()
    assert row(page, "Llama 1B, bf16, LoRA").endswith("| 2 | 8.46 | +10.1% | 9.99 | -0.1% | 4.8% |")
    assert row(page, "T5-small, bf16").endswith("| 16 | 5.57 | -34.8% | 5.99 | -36.5% | 4.8% |")
    assert (
        "**Allocated**, 3 jobs: median error 10.1%, 1 within 5%; most over +10.1% (Llama 1B, bf16, LoRA), "
        "most under -34.8% (T5-small, bf16)" in page
    )
    assert "more than predicted with its margin**: T5-small, bf16." in page


def test_other_tables_have_medians_quartiles_and_shares_of_the_truth(root, folder):
    gpu_results.main([folder()], root)

    page = (root / "docs" / "dev" / "gpu.md").read_text()
    assert "| 1.139 (1.060 to 1.244) | 162.6 (76.4 to 277.2) |" in row(page, "Runner, 6 tensors, about 1 ms")
    assert row(page, "ResNet-50: accelerate").endswith("| 142 | 164 | 86.6% | 13 | 4.8 |")
    assert "every bit the same | 1 | 0 |" in row(page, "layers, fp32, Adam, foreach")


def test_what_failed_and_what_was_skipped_is_listed(root, folder):
    gpu_results.main([folder()], root)

    page = (root / "docs" / "dev" / "gpu.md").read_text()
    assert "| **differs** |" in row(page, "convolutions, fp32, AdamW, fused")
    failed = page.split("### What failed, and what was skipped")[1]
    assert "- survival: convolutions, fp32, AdamW, fused: 1 in backward" in failed
    assert "- lost: Runner.step: died: SIGABRT" in failed
    assert "- predictions: skipped (the time is over): GRU 2 x 1024, fp32" in failed


def test_pages_name_the_gpu_and_the_date_or_say_that_there_was_no_run(root, folder):
    gpu_results.main([], root)
    assert all("**Not yet run on a GPU.**" in (root / page).read_text() for page in gpu_results.STATUS)

    gpu_results.main([folder()], root)

    said = "Run on an NVIDIA H200 (2026-11-26, driver 580.159.04, CUDA 13.0, PyTorch 2.11.0); [2 of "
    for page in gpu_results.STATUS:
        text = (root / page).read_text()
        assert said in text
        assert "Not yet run" not in text
    assert "checks failed](docs/dev/gpu.md)" in (root / "README.md").read_text()
    assert "checks failed](dev/gpu.md)" in (root / "docs" / "benchmarks.md").read_text()


def test_later_folder_replaces_parts_that_it_did_not_skip(root, folder):
    later = other(written="2026-12-01T00:00:00+00:00")
    later["parts"]["predictions"] |= {"status": "skipped", "skipped": "the time is over", "rows": []}
    later["parts"]["survival"]["rows"] = [{"what": "layers", "found": "", "ok": None, "skipped": "late", "data": {}}]
    later["parts"]["lost"]["rows"][0] |= {"ok": True, "found": "DeviceLostError"}

    gpu_results.main([folder("one", allocations=b"first"), folder("two", later, allocations=b"second")], root)

    kept, page = record(root), (root / "docs" / "dev" / "gpu.md").read_text()
    assert kept["parts"]["lost"]["rows"][0]["found"] == "DeviceLostError"
    assert "made" not in kept["parts"]["lost"]
    assert kept["parts"]["predictions"]["rows"]
    assert kept["parts"]["survival"]["rows"] != later["parts"]["survival"]["rows"]
    assert "### Predicted memory against the real (PyTorch 2.11.0)" in page
    assert "## NVIDIA H200, 2026-12-01" in page
    # Allocations are those of the predictions that are kept.
    assert (root / "benchmarks" / "results" / "gpu-h200-allocations.json.gz").read_bytes() == b"first"


def test_run_of_one_part_leaves_the_others_of_the_record(root, folder):
    gpu_results.main([folder("one", allocations=b"first")], root)
    alone = other(written="2026-12-01T00:00:00+00:00", parts={"lost": SAMPLE["parts"]["lost"]})

    assert gpu_results.main([folder("two", alone, allocations=b"second")], root) == 0

    assert record(root)["parts"].keys() == SAMPLE["parts"].keys()
    assert record(root)["parts"]["survival"]["made"].startswith("2026-11-26")
    assert (root / "benchmarks" / "results" / "gpu-h200-allocations.json.gz").read_bytes() == b"first"


def test_failed_tests_count_as_one_check(root, folder):
    rows = [{"what": f"test {number}", "found": "E", "ok": False, "data": {}} for number in range(3)]
    run = other(parts={"tests": {"title": "Tests", "status": "done", "rows": rows}})

    gpu_results.main([folder(run=run)], root)

    assert "[1 of 1 checks failed]" in (root / "README.md").read_text()


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (other(device="cpu"), "was not made on a GPU"),
        (other(machine=SAMPLE["machine"] | {"gpu": None}), "was not made on a GPU"),
        (other(tiny=True), "was made with --tiny"),
        (other(parts={}), "has no part that found anything"),
        (other(parts={"lost": {"title": "", "status": "done", "rows": [{"what": ""}]}}), "a row is none of"),
        ('{"device": "cu', "is no result of benchmarks/gpu.py (JSONDecodeError"),
        ('{"device": "cuda"}', "is no result of benchmarks/gpu.py (KeyError: 'machine')"),
        ("[]", "is no result of benchmarks/gpu.py (TypeError"),
    ],
)
def test_folder_that_cannot_be_used_is_refused_in_one_sentence(root, folder, capsys, run, why):
    assert gpu_results.main([folder(run=run)], root) == 2

    error = capsys.readouterr().err
    assert why in error
    assert error.count("\n") == 1
    assert not (root / "benchmarks").exists()


def test_folder_without_a_result_is_refused(root, tmp_path, capsys):
    assert gpu_results.main([str(tmp_path / "nowhere")], root) == 2
    assert "FileNotFoundError" in capsys.readouterr().err


def test_runs_of_two_gpus_are_not_made_one(root, folder, capsys):
    b200 = other(machine=SAMPLE["machine"] | {"gpu": "NVIDIA B200"})

    assert gpu_results.main([folder("one"), folder("two", b200)], root) == 2
    assert "different GPUs: NVIDIA B200, NVIDIA H200" in capsys.readouterr().err


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
