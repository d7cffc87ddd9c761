"""Accelerate's loop trains with `auto_accumulate` as it does with the whole batch at once."""

import re

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import autoaccum
from autoaccum.integrations.accelerate import auto_accumulate
from support.data.small_samples import BATCH, CLASSES, WORDS, vectors, words_and_labels
from support.faults.modes import FailAt
from support.models.small import Limited


@pytest.fixture(autouse=True)
def states_of_its_own(monkeypatch):
    """Accelerate keeps its state for the process, and sets variables of the environment."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("AUTOACCUM_CACHE_DIR", "")
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()


def single():
    """Samples in the type that fp16 training begins with."""
    inputs, targets = vectors().tensors
    return TensorDataset(inputs.float(), targets)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, WORDS)

    def forward(self, words):
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1], dtype=self.head.weight.dtype)
        return self.head(self.layer(self.words(words), src_mask=mask, is_causal=True))


def perceptron():
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, CLASSES))


def cross_entropy(outputs, targets):
    if outputs.dim() > 2:
        outputs, targets = outputs[:, :-1].flatten(0, 1), targets[:, 1:].flatten()
    return functional.cross_entropy(outputs, targets)


def options(**further):
    return {"device": autoaccum.Simulated("1GiB")} | further


class Loop:
    """A loop as Accelerate's documentation writes it, with `auto_accumulate` or without it."""

    def __init__(
        self, kind=perceptron, most=None, data=vectors, *, is_plain=False, dtype=torch.float64, scaler=None, **settings
    ):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, **settings)
        if scaler is not None:  # as it does on GPUs, where alone it allows fp16
            accelerator.state._mixed_precision, accelerator.native_amp, accelerator.scaler = "fp16", True, scaler
        model = Limited(kind().to(dtype), most)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        loader = DataLoader(data(), batch_size=BATCH)
        prepared = accelerator.prepare(model, optimizer, scheduler, loader)
        self.accelerator, (self.model, self.optimizer, self.scheduler, self.loader) = accelerator, prepared
        self.backward = None if is_plain else auto_accumulate(accelerator, self.model, loss=cross_entropy, **options())
        self.losses, self.rates, self.seen = [], [], []

    def epoch(self, skip=0):
        for batch in self.accelerator.skip_first_batches(self.loader, skip):
            with self.accelerator.accumulate(self.model):
                self.step(batch)
        return self

    def step(self, batch):
        if self.backward is None:
            loss = cross_entropy(self.model(batch[0]), batch[1])
            self.accelerator.backward(loss)
            self.losses.append(loss.item())
        else:
            self.losses.append(self.backward(batch).loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.rates.append(self.scheduler.get_last_lr())
        self.seen.append(len(self.accelerator.gather_for_metrics(batch[1])))


def assert_same(one, other, tolerance=1e-12):
    for name, value in one.model.state_dict().items():
        torch.testing.assert_close(other.model.state_dict()[name], value, rtol=0, atol=tolerance)
    assert other.losses == pytest.approx(one.losses, rel=max(tolerance, 1e-9))
    assert (other.rates, other.seen) == (one.rates, one.seen)


@pytest.mark.parametrize(
    ("kind", "data"),
    [(perceptron, vectors), (Words, words_and_labels)],
    ids=lambda one: one.__name__,
)
def test_three_updates_are_those_of_whole_batches(kind, data):
    plain = Loop(kind, data=data, is_plain=True).epoch()

    other = Loop(kind, most=5, data=data).epoch()

    assert len(other.losses) == 3
    assert_same(plain, other)


def test_out_of_memory_at_any_operator_changes_neither_parameters_nor_losses():
    plain = Loop(is_plain=True).epoch()
    hits = 0

    def run(point):
        mode, loop = FailAt(point), Loop()
        inner = loop.backward

        def failing(batch):
            with mode:
                return inner(batch)

        loop.backward = failing
        loop.epoch()
        return mode, loop

    operators = run(0)[0].count
    for point in range(1, operators + 1, max(1, operators // 15)):
        mode, loop = run(point)
        hits += mode.hits
        assert_same(plain, loop)

    assert hits >= 15


def test_precision_is_accelerates_own():
    plain = Loop(is_plain=True, dtype=torch.float32, mixed_precision="bf16")
    other = Loop(most=5, dtype=torch.float32, mixed_precision="bf16")
    types = []
    for loop in (plain, other):
        for batch in loop.loader:
            batch[0] = batch[0].float()
        loop.model.body.register_forward_hook(lambda _, inputs, outputs: types.append(outputs.dtype))
        loop.model.body.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
        loop.epoch()

    assert set(types) == {torch.bfloat16}
    assert_same(plain, other, 5e-2)


def test_a_scaler_of_the_accelerators_is_used():
    """Its first scale overflows in fp16, so the optimizer and the scheduler skip that update."""
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**24, backoff_factor=2.0**-16) for _ in range(2)]
    plain, other = (
        Loop(most=most, is_plain=most is None, scaler=scaler, data=single, dtype=torch.float32)
        for most, scaler in zip((None, 5), scalers, strict=True)
    )

    plain.epoch(), other.epoch()

    assert scalers[1].state_dict() == scalers[0].state_dict()
    assert plain.rates[0] == [0.05]
    assert scalers[0].get_scale() == 256.0
    assert_same(plain, other, 1e-3)


def test_training_resumes_from_accelerates_checkpoint(tmp_path):
    plain, first = Loop(is_plain=True).epoch().epoch(), Loop(most=5).epoch()
    first.accelerator.save_state(tmp_path)

    second = Loop(most=5)
    second.accelerator.load_state(tmp_path)
    second.epoch()

    plain.losses, plain.rates, plain.seen = plain.losses[3:], plain.rates[3:], plain.seen[3:]
    assert_same(plain, second)


@pytest.mark.parametrize("compiles", [False, True])
def test_ranks_of_which_one_runs_out_end_with_the_same_parameters_as_whole_batches(rank_pool, compiles):
    (alone,) = rank_pool.run("adapters:accelerate", size=1, is_ours=False)

    found = rank_pool.run("adapters:accelerate", size=2, most={1: 2}, compiles=compiles)

    assert all(map(torch.equal, found[0]["parameters"], found[1]["parameters"]))
    assert found[0]["losses"] == found[1]["losses"]
    assert found[0]["losses"] == pytest.approx(alone["losses"])
    assert found[0]["gathered"] == alone["gathered"]
    for mine, whole in zip(found[0]["parameters"], alone["parameters"], strict=True):
        torch.testing.assert_close(mine, whole, rtol=0, atol=1e-12)


def test_a_model_that_the_accelerator_compiles_is_trained():
    torch.compiler.reset()
    plain, other = Loop(is_plain=True, dynamo_backend="eager").epoch(), Loop(dynamo_backend="eager").epoch()
    torch.compiler.reset()

    assert_same(plain, other)


# --- accumulated batches, and the loop's own loss ---------------------------------------------------------------------


@pytest.mark.parametrize("most", [None, 5])
def test_batches_that_the_accelerator_accumulates_are_added_up(most):
    plain, other = (
        Loop(is_plain=True, gradient_accumulation_steps=2).epoch(),
        Loop(most=most, gradient_accumulation_steps=2),
    )

    assert_same(plain, other.epoch())


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_model_that_is_not_prepared_is_refused():
    with pytest.raises(autoaccum.errors.InvalidInputError, match="prepare"):
        auto_accumulate(Accelerator(cpu=True), perceptron(), loss=cross_entropy)


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"])
def test_what_reduces_gradients_by_itself_is_refused_by_name(kind):
    loop = Loop(is_plain=True)
    loop.accelerator.state.distributed_type = DistributedType[kind]

    with pytest.raises(
        autoaccum.errors.InvalidInputError, match=f"trains with {kind}.*find_executable_micro_batch.*autoaccum run"
    ):
        auto_accumulate(loop.accelerator, loop.model, loss=cross_entropy)


def test_a_model_that_is_compiled_around_its_wrapper_is_refused_and_left_as_it_is(rank_pool):
    for said, is_left in rank_pool.run("adapters:compiled", size=2):
        assert re.search(r"DistributedDataParallel.* model\.compile\(\)", said)
        assert is_left


def test_a_log_within_the_loss_is_refused():
    loop = Loop(is_plain=True)

    def closure(batch):
        loss = cross_entropy(loop.model(batch[0]), batch[1])
        loop.accelerator.log({"loss": loss.item()})
        return loss

    backward = auto_accumulate(loop.accelerator, loop.model, closure=closure, **options())
    with pytest.raises(autoaccum.InvalidInputError, match=r"Accelerator.log .* not once a batch; log what"):
        backward(next(iter(loop.loader)))
    assert "log" not in vars(loop.accelerator)
