"""`autoaccum run` starts ultralytics' own command again with smaller batches, under a real limit of memory."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

IMAGES, PIXELS = 16, 320

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("ultralytics") is None,
        reason="ultralytics is not installed; scripts/test_with.sh ultralytics has it",
    ),
    pytest.mark.skipif(shutil.which("prlimit") is None, reason="there is no prlimit to set a limit with"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The description of a dataset with one box in each image."""
    folder = tmp_path_factory.mktemp("boxes")
    chance = np.random.default_rng(0)
    for part, images in (("train", IMAGES), ("val", 2)):
        for kind in ("images", "labels"):
            (folder / kind / part).mkdir(parents=True)
        for number in range(images):
            pixels = chance.integers(0, 255, (64, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "images" / part / f"{number}.png")
            (folder / "labels" / part / f"{number}.txt").write_text("0 0.5 0.5 0.4 0.4\n")
    described = folder / "data.yaml"
    described.write_text(f"path: {folder}\ntrain: images/train\nval: images/val\nnames: {{0: box}}\n")
    return described


def yolo(data, folder, *, limit_bytes, retries=5):
    settings = {"model": "yolo11n.yaml", "data": data, "epochs": 1, "imgsz": PIXELS, "device": "cpu", "workers": 0}
    settings |= {"plots": False, "val": False, "amp": False, "project": folder / "runs", "exist_ok": True}
    arguments = [f"{name}={value}" for name, value in settings.items()]
    binaries = Path(sys.executable).parent
    run = [binaries / "autoaccum", "run", "--target-batch", "16", "--no-cache", "--retries", str(retries), "--"]
    limit = ["prlimit", f"--data={limit_bytes}"]
    train = [binaries / "yolo", "detect", "train", "batch={micro_batch}", "nbs={target_batch}", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "YOLO_CONFIG_DIR": str(folder), "MPLCONFIGDIR": str(folder)}
    return subprocess.run(
        [*run, *limit, *train], capture_output=True, text=True, timeout=800, check=False, env=environment, cwd=folder
    )


def test_training_that_dies_of_its_batch_ends_with_a_smaller_one(data, tmp_path):
    ended = yolo(data, tmp_path, limit_bytes=2_000_000_000)

    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "with micro-batches of 16; restarting" in ended.stderr
    assert (tmp_path / "runs" / "train" / "weights" / "last.pt").exists()
    used = (tmp_path / "runs" / "train" / "args.yaml").read_text()
    (batch,) = (int(line.split(":")[1]) for line in used.splitlines() if line.startswith("batch:"))
    assert batch in (1, 2, 4, 8)
    assert "nbs: 16" in used
