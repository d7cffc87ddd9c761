"""A report of memory running out tells the truth, and the training is the same as without one."""

import contextlib
import copy
import gc
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import autoaccum
import warm
from autoaccum._memory import Simulated
from autoaccum._report.oom_view import read_postmortem, show_postmortem
from autoaccum.errors import AutoaccumError, DoesNotFitError, InvalidInputError
from faults import FailAt, state_of
from folders import TESTS
from helpers import assert_bitwise

SAMPLES, WIDTH, WIDE = 200, 8, 128
# Of one micro-batch of all samples, in bytes.
NARROW_BYTES, WIDE_BYTES = SAMPLES * WIDTH * 4, SAMPLES * WIDE * 4


class Wide(nn.Module):
    """Makes the two largest tensors of the model: one in a layer of its own, one by itself."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDE)
        self.down = nn.Linear(WIDE, WIDTH)

    def forward(self, inputs):
        wide = self.up(inputs).view(-1, 2, WIDE // 2)
        return inputs + self.down(wide.transpose(1, 2).softmax(-1).flatten(1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.blocks = nn.ModuleList([Wide(), Wide()])
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, 3))

    def forward(self, inputs):
        hidden = self.first(inputs) * self.scale
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def train(capacity, folder=None, *, model=None, steps=3, **options):
    torch.manual_seed(0)
    model = Model() if model is None else model
    loader = [(torch.randn(SAMPLES, 4), torch.arange(SAMPLES) % 3) for _ in range(steps)]
    settings = {
        "loss": nn.CrossEntropyLoss(),
        "micro_batch": SAMPLES,
        "precision": "fp32",
        "progress": False,
        "cache": False,
    } | options
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    device = capacity if not isinstance(capacity, int) else Simulated(capacity)
    result = autoaccum.fit(
        model, loader, SAMPLES, device=device, optimizer=optimizer, oom_report=folder, seed=0, **settings
    )
    return model, optimizer, result


def reports(folder):
    return sorted(Path(folder).glob("*.json"))


def only_report(folder):
    (path,) = reports(folder)
    return read_postmortem(path)


def of_category(report, category):
    return next((row for row in report["alive"]["by_category"] if row["category"] == category), None)


def activations(report):
    return [row for row in report["alive"]["largest"] if row["category"] == "activations"]


# Enough for the first block and half of the second; for all of the forward pass.
IN_FORWARD, IN_BACKWARD = int(2.6 * WIDE_BYTES), int(3.5 * WIDE_BYTES)


def test_report_names_the_largest_tensors_and_the_modules_that_made_them(tmp_path):
    train(IN_FORWARD, tmp_path)

    report = only_report(tmp_path)
    largest = activations(report)[:2]
    assert report["phase"] == "forward"
    assert {row["bytes"] for row in largest} == {WIDE_BYTES}
    assert {(row["module"], row["kind"], row["operator"]) for row in largest} == {
        ("blocks.0", "Wide", "Softmax"),
        ("blocks.1.up", "Linear", "Addmm"),
    }


def test_report_names_the_line_of_the_model_that_made_a_tensor(tmp_path):
    train(IN_FORWARD, tmp_path)

    up = next(row for row in activations(only_report(tmp_path)) if row["module"] == "blocks.1.up")
    file, _, line = up["source"].rpartition(":")
    assert file == __file__
    assert "self.up(inputs)" in Path(__file__).read_text().splitlines()[int(line) - 1]


def test_report_names_the_modules_in_which_memory_ran_out(tmp_path):
    train(IN_FORWARD, tmp_path)

    assert [place["module"] for place in only_report(tmp_path)["failed_in"]] == ["(model)", "blocks.1"]


@pytest.fixture(scope="module")
def in_a_process_of_its_own(tmp_path_factory):
    """Where nothing is alive that other tests have left; the folder of each capacity's report."""
    folders = {capacity: str(tmp_path_factory.mktemp("alone")) for capacity in (IN_FORWARD, IN_BACKWARD)}
    script = f"import test_oom_report as tests\nfor given in {folders}.items(): tests.train(*given)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS / "engine"), *sys.path])}
    subprocess.run([*warm.python(), "-c", script], check=True, timeout=200, env=environment)
    return folders


@pytest.mark.parametrize("capacity", [IN_FORWARD, IN_BACKWARD])
def test_what_is_alive_adds_up_to_what_the_device_holds(in_a_process_of_its_own, capacity):
    report = only_report(in_a_process_of_its_own[capacity])

    held = sum(
        row["bytes"] for row in report["alive"]["by_category"] if row["category"] in ("activations", "gradients")
    )
    held += WIDTH * 4  # the copy of the buffer that is set aside
    held += 2 * 8 * len(list(Model().parameters()))  # two sums of each parameter, which show whether forward() moves it
    # What is in flight in a backward pass is nobody's: neither saved nor a parameter's gradient.
    in_flight = NARROW_BYTES + WIDE_BYTES if report["phase"] == "backward" else 0
    assert held <= report["memory"]["used_bytes"] <= held + in_flight


def test_parameters_gradients_buffers_and_optimizer_state_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "autoaccum._engine.oom_report._LARGEST", 100_000
    )  # other tests may have left larger tensors alive
    device = Simulated(2 * 2**20)
    failing = FailsLater(Model(), device)
    train(device, tmp_path, model=failing)

    report = only_report(tmp_path)
    weights = sum(p.nbytes for p in failing.parameters())
    assert report["step"] == 2
    assert of_category(report, "parameters")["bytes"] == weights
    assert of_category(report, "optimizer state")["bytes"] == weights
    assert of_category(report, "buffers")["bytes"] == WIDTH * 4
    assert of_category(report, "inputs")["bytes"] == SAMPLES * (4 * 4 + 8)
    names = {row["name"] for row in report["alive"]["largest"]}
    assert {"model.blocks.0.up.weight", "model.blocks.0.up.weight momentum_buffer"} <= names


class FailsLater(nn.Module):
    """Asks for more than there is, once, in the second window."""

    def __init__(self, model, device):
        super().__init__()
        self.model = model
        self.device = [device]
        self.calls = 0

    def forward(self, inputs):
        self.calls += 1
        outputs = self.model(inputs)
        if self.calls == 2:
            self.device[0].ensure(2**30)
        return outputs


@pytest.mark.parametrize("capacity", [IN_FORWARD, IN_BACKWARD])
@pytest.mark.parametrize("options", [{}, {"micro_batch": "auto"}, {"micro_batch": "auto", "probe": "before"}])
def test_training_with_a_report_ends_as_without_to_the_last_bit(tmp_path, capacity, options):
    model, optimizer, result = train(capacity, tmp_path, **options)
    plain, other, expected = train(capacity, **options)

    assert_bitwise(model.state_dict(), plain.state_dict())
    assert_bitwise(optimizer.state_dict()["state"], other.state_dict()["state"])
    assert [report.loss for report in result.history] == [report.loss for report in expected.history]
    assert result.oom_events == expected.oom_events


def outcome(folder, point):
    """What a training comes to whose operator number `point` runs out of memory, and how many operators it ran."""
    torch.manual_seed(0)
    model = Model()
    with FailAt(point) as fault:
        try:
            _, optimizer, result = train(2**22, folder, model=model, steps=2)
        except (AutoaccumError, torch.OutOfMemoryError) as error:
            return str(error), fault.count, fault.hits
    return state_of(model, optimizer), result.oom_events, fault.count, fault.hits


def test_failure_of_any_operator_ends_as_without_a_report_and_no_operator_is_added(tmp_path):
    operators = outcome(None, 0)[-2]
    for point in range(5, operators, 73):  # all of them take a minute and a half
        assert outcome(tmp_path / str(point), point) == outcome(None, point)
        assert len(reports(tmp_path / str(point))) <= 1


def test_only_the_first_failure_of_a_run_is_written(tmp_path):
    _, _, result = train(int(1.2 * WIDE_BYTES), tmp_path)

    assert result.oom_events > 1
    assert len(reports(tmp_path)) == 1


@pytest.mark.parametrize("probe", ["inline", "before"])
def test_sizes_that_are_tried_leave_no_report(tmp_path, probe):
    train(IN_BACKWARD, tmp_path, micro_batch="auto", probe=probe)

    assert reports(tmp_path) == []


@pytest.mark.parametrize("options", [{"probe": "inline"}, {"probe": "before"}, {"probe": "off"}])
def test_one_sample_that_does_not_fit_leaves_a_report(tmp_path, options):
    with pytest.raises(DoesNotFitError):
        train(600, tmp_path, micro_batch="auto", **options)

    assert only_report(tmp_path)["micro_batch"] in (1, SAMPLES)


def test_lack_of_memory_in_an_evaluation_leaves_a_report(tmp_path):
    device = Simulated(2**20)
    model = FailsLater(Model(), device)
    train(device, tmp_path, model=model, steps=1, val_loader=[(torch.randn(SAMPLES, 4), torch.arange(SAMPLES) % 3)])

    report = only_report(tmp_path)
    assert (report["phase"], report["step"]) == ("evaluate", None)


def test_run_that_fits_leaves_an_empty_folder(tmp_path):
    train(2**22, tmp_path / "reports")

    assert list((tmp_path / "reports").iterdir()) == []


def hooks():
    module = nn.modules.module
    return len(module._global_forward_hooks), len(module._global_forward_pre_hooks)


@pytest.mark.parametrize("capacity", [600, IN_FORWARD, 2**22])
def test_nothing_of_it_stays_behind(tmp_path, capacity):
    before = hooks()
    model = Model()
    plain = copy.deepcopy(model)
    with contextlib.suppress(DoesNotFitError):
        train(capacity, tmp_path, model=model)

    assert hooks() == before
    assert [vars(part).keys() for part in model.modules()] == [vars(part).keys() for part in plain.modules()]


def test_interrupt_while_it_begins_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    before = hooks()
    monkeypatch.setattr(nn.modules.module, "register_module_forward_hook", interrupted)

    with pytest.raises(KeyboardInterrupt):
        train(2**22, tmp_path)

    assert hooks() == before


class Counting(autoaccum.Callback):
    """Counts the tensors that are alive as memory has run out, without a collection that would hide a cycle."""

    def __init__(self):
        self.alive = []

    def on_oom(self, event, *, step):
        self.alive.append(sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()))


def test_report_holds_no_tensor_once_it_is_written(tmp_path):
    counts = {}
    for folder in (None, tmp_path):
        gc.collect()
        gc.disable()
        counting = Counting()
        try:
            train(IN_FORWARD, folder, callbacks=[counting])
        finally:
            gc.enable()
        counts[folder] = counting.alive[0]

    assert len(reports(tmp_path)) == 1
    assert counts[tmp_path] == counts[None]


def test_report_that_cannot_be_written_is_said_and_changes_nothing(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "reports"

    def gone(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", gone)
    model, _, _ = train(IN_FORWARD, folder, progress="lines")
    plain, _, _ = train(IN_FORWARD)

    assert_bitwise(model.state_dict(), plain.state_dict())
    assert "No space left" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_saved_tensors_that_hooks_have_packed_stay_packed(tmp_path):
    unpacked = []

    class Packs(Model):
        def forward(self, inputs):
            with torch.autograd.graph.saved_tensors_hooks(
                lambda one: [one.detach()], lambda one: unpacked.append(1) or one[0]
            ):
                return super().forward(inputs)

    seen = {}
    for folder in (None, tmp_path):
        unpacked.clear()
        train(IN_FORWARD, folder, model=Packs(), steps=1)
        seen[folder] = len(unpacked)

    assert len(reports(tmp_path)) == 1
    assert seen[tmp_path] == seen[None]


def test_checkpointed_model_is_not_computed_again_for_the_report(tmp_path):
    class Checkpointed(Model):
        calls = 0

        def forward(self, inputs):
            hidden = self.first(inputs)
            for block in self.blocks:
                hidden = torch.utils.checkpoint.checkpoint(self.counted, block, hidden, use_reentrant=False)
            return self.head(hidden)

        def counted(self, block, hidden):
            type(self).calls += 1
            return block(hidden)

    calls = []
    for folder in (None, tmp_path):
        Checkpointed.calls = 0
        train(int(2.6 * WIDE_BYTES), folder, model=Checkpointed(), steps=1)
        calls.append(Checkpointed.calls)

    assert len(reports(tmp_path)) == 1
    assert calls[0] == calls[1]


@pytest.mark.skipif(sys.platform != "linux", reason="a limit on host memory needs Linux")
def test_report_is_written_where_host_memory_is_limited(tmp_path):
    script = f"""
import sys, torch, autoaccum
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(256, 64), nn.Linear(64, 16384), nn.Tanh(), nn.Linear(16384, 2))
loader = [(torch.randn(512, 256), torch.randint(0, 2, (512,)))]
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
autoaccum.fit(model, loader, 512, loss=nn.CrossEntropyLoss(), optimizer=optimizer, device="cpu", micro_batch=512,
              memory_limit="60MiB", precision="fp32", cache=False, progress="lines", oom_report={str(tmp_path)!r})
"""
    source = Path(autoaccum.__file__).parents[1]
    done = subprocess.run(
        [*warm.python(), "-c", script],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=os.environ | {"PYTHONPATH": str(source)},
    )

    assert done.returncode == 0, done.stderr[-2000:]
    report = only_report(tmp_path)
    assert report["memory"]["limit_bytes"] == 60 * 2**20
    assert activations(report)[0]["shape"][1] == 16384


def test_compiled_model_is_reported_without_marks(tmp_path):
    model = Model()
    model.compile(backend="eager")

    train(IN_FORWARD, tmp_path, model=model)

    report = only_report(tmp_path)
    softmax = next(row for row in activations(report) if row["operator"] == "Softmax")
    assert softmax["module"] is None
    assert report["failed_in"] == []


# --- the folder, and reading it back ----------------------------------------------------------------------------------


def test_folder_that_is_a_file_is_refused_before_anything_else(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(InvalidInputError, match="oom_report="):
        train(2**22, tmp_path / "file")


def test_folder_that_is_no_path_is_refused():
    with pytest.raises(InvalidInputError, match="oom_report=3"):
        train(2**22, 3)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    train(IN_FORWARD, folder)
    return reports(folder)[0]


def shown(path, width=160):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(show_postmortem(path))
    return console.export_text()


def test_report_is_shown_with_what_matters(written):
    text = shown(written)

    for expected in ("out of memory in step 1", "blocks.1.up Addmm", "activations", "test_oom_report.py:", "(Wide"):
        assert expected in text


def test_report_without_a_step_and_without_a_size_is_shown(written, tmp_path):
    record = json.loads(written.read_text())
    record |= {"step": None, "micro_batch": None, "failed_in": [], "allocator_snapshot": "a.pickle"}
    record["neighbours"] = [{"pid": 7, "name": "other", "used_bytes": None}]
    (tmp_path / "r.json").write_text(json.dumps(record))

    text = shown(tmp_path / "r.json")

    assert "other (pid 7)" in text
    assert "a.pickle" in text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "empty"),
        ("no json", "not JSON"),
        ('{"format": "autoaccum.oom_report", "ver', "cut short"),
        ("[1, 2]", "another kind"),
        ('{"format": "other"}', "another kind"),
        ('{"format": "autoaccum.oom_report", "version": 99}', "version 99"),
        ('{"format": "autoaccum.oom_report", "version": 99, "software": null}', "version 99"),
        ("[" * 100_000, "another kind"),
        ('{"format": "autoaccum.oom_report", "version": 1}', "incomplete"),
    ],
)
def test_file_that_is_no_report_is_refused_with_the_reason(tmp_path, content, reason):
    (tmp_path / "r.json").write_text(content)

    with pytest.raises(InvalidInputError, match=reason):
        show_postmortem(tmp_path / "r.json")


def test_file_that_is_not_there_or_no_text_is_refused(tmp_path):
    (tmp_path / "r.json").write_bytes(b"\xff\xfe\x80")

    for path in (tmp_path / "none.json", tmp_path, tmp_path / "r.json"):
        with pytest.raises(InvalidInputError, match="oom_report=FOLDER"):
            show_postmortem(path)
