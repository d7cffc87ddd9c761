"""`autoaccum run` starts timm's train.py again with smaller micro-batches, under a real limit of memory.

timm's package has no train.py: TIMM_TRAIN names that of its repository, at the version installed.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

IMAGES, TARGET = 32, 32

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif("TIMM_TRAIN" not in os.environ, reason="TIMM_TRAIN=... names timm's train.py"),
    pytest.mark.skipif(shutil.which("prlimit") is None, reason="there is no prlimit to set a limit with"),
]


@pytest.fixture
def images(tmp_path):
    """A folder of images of two classes."""
    chance = np.random.default_rng(0)
    for part, number in (("train", IMAGES // 2), ("validation", 2)):
        for kind in ("a", "b"):
            folder = tmp_path / "images" / part / kind
            folder.mkdir(parents=True)
            for image in range(number):
                pixels = chance.integers(0, 255, (64, 64, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{image}.png")
    return tmp_path / "images"


def test_training_that_dies_of_its_batch_ends_with_smaller_ones_and_accumulates(images, tmp_path):
    binaries = Path(sys.executable).parent
    run = [binaries / "autoaccum", "run", "--target-batch", str(TARGET), "--no-cache", "--retries", "6", "--"]
    limit = ["prlimit", f"--data={1_300_000_000}"]
    settings = {"model": "resnet18", "img-size": 160, "num-classes": 2, "epochs": 1, "device": "cpu", "workers": 0}
    settings |= {"warmup-epochs": 0, "output": tmp_path / "out", "validation-batch-size": 2}
    arguments = [str(part) for name, value in settings.items() for part in (f"--{name}", value)]
    train = [sys.executable, os.environ["TIMM_TRAIN"], "--data-dir", images, *arguments]
    train += ["--batch-size", "{micro_batch}", "--grad-accum-steps", "{accum_steps}"]

    ended = subprocess.run(
        [*map(str, [*run, *limit, *train])],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
    )

    assert ended.returncode == 0, ended.stderr[-3000:]
    assert f"with micro-batches of {TARGET}; restarting" in ended.stderr
    (last,) = (tmp_path / "out").rglob("last.pth.tar")  # each start has a folder of its own
    used = (last.parent / "args.yaml").read_text()
    settings = dict(line.split(": ", 1) for line in used.splitlines() if ": " in line)
    batch, steps = int(settings["batch_size"]), int(settings["grad_accum_steps"])
    assert batch < TARGET
    assert batch * steps == TARGET
