"""The key of a job: the same for every start of it, another where a step may take other memory."""

import contextlib
import io
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from autoaccum import Simulated
from autoaccum._sizing.job_key import key_of
from support.models.small import classifier, labelled
from support.training.steps import training_step

JOB = """
import torch
from torch import nn
from autoaccum._memory.available_devices import backend_for  # an argument
from autoaccum._sizing.job_key import key_of

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.names = {"b", "a", "c"}

model = Attention()
key = key_of(
    [model], {"x": torch.randn(6, 4), "names": {"a", "b"}}, optimizer=torch.optim.Adam(model.parameters()),
    memory=backend_for(torch.device("cpu")), precision="bf16", target_batch=6, limit_bytes=None, loss_scope="window",
)
print(key.digest)
"""
SETTINGS = {"precision": "fp32", "target_batch": 64, "limit_bytes": 1 << 30, "loss_scope": "micro_batch"}


def key(model=None, optimizer=None, *, batch=None, memory=None, **settings):
    step = training_step(model or classifier(), nn.functional.cross_entropy, optimizer, memory=memory)
    batch, settings = labelled(4) if batch is None else batch, SETTINGS | settings
    return key_of(step.objective.modules, batch, optimizer=step.optimizer, memory=step.memory, **settings)


def differ(keys):
    digests = {}
    for name, made in keys.items():
        digests.setdefault(made.digest, []).append(name)
    return [names for names in digests.values() if len(names) > 1]


def test_key_is_the_same_in_every_process():
    # Of another hash seed than this one; it must import for itself.
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    ended = subprocess.run(
        [sys.executable, "-c", JOB],
        env=os.environ | {"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(JOB, "job", "exec"), {"__name__": "__main__"})  # noqa: S102

    assert said.getvalue() == ended.stdout
    assert len(said.getvalue().strip()) == 64


def test_values_number_of_samples_and_settings_of_the_optimizer_make_no_other_job():
    torch.manual_seed(1)
    first = key(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    torch.manual_seed(2)
    second = key(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=7), batch=labelled(9))

    assert first == second
    assert first.about == second.about


class Own(nn.Module):
    def __init__(self, inner=None, **attributes):
        super().__init__()
        self.inner = inner or nn.Linear(4, 3).double()
        vars(self).update(attributes)

    def forward(self, x):
        return self.inner(x)


def with_(model, change):
    change(model)
    return model


def test_models_of_other_modules_tensors_or_switches_are_other_jobs():
    models = {
        "plain": Own(),
        "other size": Own(nn.Linear(4, 5).double()),
        "other type": Own(nn.Linear(4, 3)),
        "deeper": Own(nn.Sequential(nn.Linear(4, 3).double())),
        "other class": Own(nn.Sequential(nn.Linear(4, 3).double(), nn.ReLU())),
        "evaluation": Own().eval(),
        "frozen": with_(Own(), lambda model: model.inner.bias.requires_grad_(False)),
        "buffer": with_(Own(), lambda model: model.register_buffer("mask", torch.zeros(9))),
        "checkpointing": Own(gradient_checkpointing=True),
        "checkpointing off": Own(gradient_checkpointing=False),
    }

    assert differ({name: key(model) for name, model in models.items()}) == []


def test_batches_of_other_samples_are_other_jobs():
    inputs, targets = labelled(4)
    batches = {
        "pair": (inputs, targets),
        "floats": (inputs.float(), targets),
        "wider": (torch.cat([inputs, inputs], 1), targets),
        "images": (torch.zeros(4, 3, 8, 8), targets),
        "larger images": (torch.zeros(4, 3, 9, 9), targets),
        "images in bytes": (torch.zeros(4, 3, 8, 8, dtype=torch.uint8), targets),
        "larger images in bytes": (torch.zeros(4, 3, 9, 9, dtype=torch.uint8), targets),
        "shape": (inputs[:, None], targets),
        "mapping": {"inputs": inputs, "targets": targets},
        "other names": {"x": inputs, "targets": targets},
        "nested": ((inputs, inputs), targets),
        "names": (inputs, targets, ["a", "b", "c", "d"]),
        "array": (inputs, targets.numpy()),
        "alone": inputs,
        "scalar": (inputs, targets, torch.tensor(0)),
    }

    assert differ({name: key(batch=batch) for name, batch in batches.items()}) == []


@pytest.mark.parametrize("of_type", [torch.as_tensor, np.asarray])
def test_texts_of_another_width_make_no_other_job(of_type):
    first, second = (
        {"input_ids": of_type(np.ones((4, width), dtype=int)), "mask": of_type(np.ones((4, width), dtype=bool))}
        for width in (7, 9)
    )

    assert key(batch=first) == key(batch=second)


def test_order_of_a_mapping_and_names_in_a_list_make_no_other_job():
    inputs, targets = labelled(2)

    first = key(batch={"x": inputs, "y": targets, "names": ["a", "b"]})
    second = key(batch={"names": ["c", "d"], "y": targets, "x": inputs})

    assert first == second


def test_other_settings_versions_and_devices_are_other_jobs(monkeypatch):
    keys = {
        "plain": key(),
        "target": key(target_batch=65),
        "limit": key(limit_bytes=1 << 31),
        "no limit": key(limit_bytes=None),
        "scope": key(loss_scope="window"),
        "precision": key(precision="bf16"),
        "cap": key(cap=8),
        "optimizer": key(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
        "device": key(memory=Simulated("1GiB")),
        "size of the device": key(memory=Simulated("2GiB")),
    }
    for name, change in {
        "torch": ("torch.version.__version__", "9.9"),
        "autoaccum": ("autoaccum._sizing.job_key.__version__", "9.9"),
    }.items():
        with monkeypatch.context() as other:
            other.setattr(*change)
            keys[name] = key()

    assert differ(keys) == []
