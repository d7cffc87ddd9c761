"""TRL's trainers train, and log, as if each batch had fitted at once."""

import pytest
import torch

pytest.importorskip("trl")

import autoaccum
from autoaccum._system.notices import Notices
from autoaccum._training.accumulator import Accumulator
from autoaccum.integrations._trainer_evaluation import EvaluationInParts
from autoaccum.integrations.transformers import windowed
from faults import FailAt
from torchrun import found_by_ranks
from trainers import history, weights
from trl_trainers import TRAINERS, trained

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def environment_of_its_own(monkeypatch):
    """Transformers 4 sets a variable of Accelerate's."""
    monkeypatch.setenv("ACCELERATE_USE_IPEX", "false")


def cut(kind, **options):
    return windowed(TRAINERS[kind][0], **({"micro_batch": 5, "notices": Notices(silent=True)} | options))


def log(trainer, *, without=()):
    """The log; how far an epoch is, and its operations, depend on the loader's batches."""
    left_out = ("total_flos", *without)
    return [{key: value for key, value in entry.items() if key not in left_out} for entry in history(trainer)]


def assert_same(ours, theirs, **options):
    # TRL computes log-probabilities in single precision.
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=0.0, atol=3e-7)
    for mine, other in zip(log(ours, **options), log(theirs, **options), strict=True):
        assert mine == pytest.approx(other, rel=1e-5, abs=1e-6)


@pytest.fixture(scope="module", params=TRAINERS)
def plain(request, tmp_path_factory):
    kind = request.param
    return kind, trained(TRAINERS[kind][0], kind, tmp_path_factory.mktemp("plain"))


def test_parameters_and_all_metrics_are_those_of_whole_batches(plain, tmp_path):
    kind, theirs = plain
    ours = trained(cut(kind), kind, tmp_path)

    assert ours.autoaccum.plan.micro_batches == (4, 4, 4)
    assert_same(ours, theirs)


def test_metrics_of_accumulated_batches_are_those_of_all_of_them(plain, tmp_path):
    kind, theirs = plain
    ours = trained(cut(kind), kind, tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=3)

    assert_same(ours, theirs, without=["epoch"])


def test_metrics_are_right_after_memory_has_run_out(plain, tmp_path, monkeypatch):
    kind, theirs = plain
    patched = [(Accumulator, "backward"), (EvaluationInParts, "run")]

    def run(points):
        modes = [FailAt(*points) for _ in patched]
        with monkeypatch.context() as patch:
            for (owner, method), mode in zip(patched, modes, strict=True):
                patch.setattr(owner, method, within(mode, getattr(owner, method)))
            return trained(cut(kind), kind, tmp_path), modes

    _, whole = run(())
    for share in (0.2, 0.5, 0.8):
        ours, modes = run([int(share * min(mode.count for mode in whole))])
        assert all(mode.hits for mode in modes)
        assert_same(ours, theirs)


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    return found_by_ranks("trl_ranks.py", tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAINERS)
def test_metrics_over_two_ranks_are_those_of_one_with_the_whole_batch(of_ranks, kind, tmp_path):
    """In training and evaluation; of the loss alone, an evaluation takes the mean of the ranks' means."""
    theirs = trained(TRAINERS[kind][0], kind, tmp_path, samples=24, evaluated=12)
    (first, log_of_first, _), (second, _, failures) = (found[kind, "ours"] for found in of_ranks)
    loss = [entry["eval_loss"] for entry in of_ranks[0][kind, "plain"] if "eval_loss" in entry]

    assert all(failures)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, weights(theirs), rtol=0.0, atol=3e-7)
    assert [entry["eval_loss"] for entry in log_of_first if "eval_loss" in entry] == pytest.approx(loss, rel=1e-5)
    for mine, other in zip(log_of_first, history(theirs), strict=True):
        assert mine.keys() == other.keys()
        assert compared(mine) == pytest.approx(compared(other), rel=1e-5, abs=1e-6)


def compared(entry):
    """Without the loss of an evaluation, and the count of floating-point operations, which differs with padding."""
    return {key: value for key, value in entry.items() if key not in ("total_flos", "eval_loss")}


def within(mode, function):
    def with_faults(*args, **kwargs):
        with mode:
            return function(*args, **kwargs)

    return with_faults


def test_trainers_that_generate_their_batches_are_refused(tmp_path):
    class Generating(TRAINERS["sft"][0]):
        def _prepare_inputs(self, inputs):
            return super()._prepare_inputs(inputs)

    trainer = trained(windowed(Generating), "sft", tmp_path, train=False)

    with pytest.raises(autoaccum.InvalidInputError, match="generates its own batches"):
        trainer.train()


def test_rows_without_padding_are_refused(tmp_path):
    trainer = trained(cut("sft"), "sft", tmp_path, train=False, padding_free=True, max_length=None)

    with pytest.raises(autoaccum.InvalidInputError, match="padding_free"):
        trainer.train()
