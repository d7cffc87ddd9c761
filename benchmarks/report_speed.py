"""Times the whole command `autoaccum report` for a GPU that is not there, after all imports.

    python benchmarks/report_speed.py

A process for each model runs the command twice: PyTorch fills its caches in the first, which also imports this package
(0.4 s more where Python may not keep its bytecode). On a busy machine the time of the processor tells more than the
clock.
"""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPTS = {
    "ResNet-101": """
import torch, torchvision

if __name__ == "__main__":
    batch, loss = (torch.zeros(2, 3, 224, 224), torch.zeros(2, dtype=torch.long)), torch.nn.CrossEntropyLoss()
    autoaccum.fit(torchvision.models.resnet101, [batch], 256, loss=loss, optimizer="adamw")
""",
    "GPT-2 124M": """
import torch
from transformers import GPT2Config, GPT2LMHeadModel

if __name__ == "__main__":
    tokens = torch.zeros(2, 1024, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    autoaccum.fit(lambda: GPT2LMHeadModel(GPT2Config()), [batch], 64, optimizer="adamw")
""",
}
GPU = "a100-80gb"


def time_here(name):
    from autoaccum._cli.app import main  # noqa: PLC0415 - what is timed begins after it

    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(f"import autoaccum\n{SCRIPTS[name]}")
        exec(compile(script.read_text(), script, "exec"), {"__name__": "imported"})  # noqa: S102 - its imports
        sys.argv = ["autoaccum", "report", str(script), "--gpu", GPU, "--no-measure", "--quiet"]
        for which in ("first", "second"):
            cpu_s, clock_s = time.process_time(), time.perf_counter()
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
                main()
            cpu_s, clock_s = time.process_time() - cpu_s, time.perf_counter() - clock_s
            print(f"{name}, {which}: {cpu_s:.1f} s of the processor, {clock_s:.1f} s", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        time_here(sys.argv[1])
    else:
        for model in SCRIPTS:
            subprocess.run([sys.executable, __file__, model], check=True)
