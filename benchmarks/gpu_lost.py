"""Part of gpu.py: a kernel's assertion breaks the device for the process, and the error must say so.

Each way of training runs in its own process, which is unusable afterwards.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from gpu_common import last_json, run_part, start_child

PROMISED = ("Runner.step", "fit")
WAYS = (*PROMISED, "find_micro_batch")


def lost(findings, options):
    """Break the device in child processes, all at once, and read the errors."""
    children = {
        way: start_child("gpu_lost.py", "--child", way, options.device, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for way in WAYS
    }
    for way, child in children.items():
        try:
            out, err = child.communicate(timeout=max(1.0, findings.left_s()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            findings.add(way, "hung", ok=False)
            continue
        told = last_json(out)
        if told is None:
            tail = err.strip().splitlines()[-1:] or ["nothing"]
            findings.add(way, f"ended with {child.returncode} and said {tail[0]}", ok=False, stderr=err[-3000:])
        else:
            good = told["type"] == "DeviceLostError"
            findings.add(way, f"{told['type']}: {told['text']}", ok=good if way in PROMISED else None, **told)


def child(way, device):
    """Train until the device is lost; print what was raised."""
    import torch  # noqa: PLC0415 - the parent does not need it
    from torch import nn  # noqa: PLC0415

    import autoaccum  # noqa: PLC0415

    words, classes = 10, 4

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(words, 8), nn.Linear(8, classes)

        def forward(self, tokens):
            # Without a card, the host would reject the index, so the card's message is raised instead.
            if tokens.device.type == "cpu" and int(tokens.max()) >= words:
                raise RuntimeError("CUDA error: device-side assert triggered")
            return self.head(self.embed(tokens).mean(1))

    good = torch.randint(words, (16, 6)), torch.randint(classes, (16,))
    bad = torch.full((16, 6), 10 * words), torch.randint(classes, (16,))
    model, loss = Model(), nn.CrossEntropyLoss()
    try:
        if way == "fit":
            autoaccum.fit(model, [good, bad, *[good] * 20], 16, loss=loss, device=device, micro_batch=8, progress=False)
        elif way == "find_micro_batch":
            autoaccum.find_micro_batch(model, bad, loss=loss, device=device)
        else:
            runner = autoaccum.Runner(model, None, autoaccum.plan(16, 8), loss=loss, device=device)
            for window in [good, bad, *[good] * 20]:
                runner.step(window)
        told = {"type": "none", "text": "nothing was raised"}
    except Exception as error:  # noqa: BLE001 - it is what is looked at
        causes = []
        link = error.__cause__
        while link is not None:
            causes.append(f"{type(link).__name__}: {str(link)[:200]}")
            link = link.__cause__
        told = {"type": type(error).__name__, "text": str(error).splitlines()[0][:300], "causes": causes}
    print(json.dumps(told), flush=True)
    # The interpreter's exit would free tensors on a lost device.
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    run_part(lost, __doc__)
