"""`autoaccum.verify` in a process: what it returns, what it leaves alone, and what it cannot say."""

import contextlib
import json
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody does

import autoaccum
from support.losses.accumulation_faults import loop, micro_batches, network, samples


def right(micro_batch, accum_steps, **options):
    loop(micro_batch, accum_steps, accum_steps, **options)


def wrong(micro_batch, accum_steps, **options):
    loop(micro_batch, accum_steps, 1, **options)


def test_the_record_is_true_or_says_what_is_wrong():
    found = autoaccum.verify(wrong, 6)

    assert not found
    assert not found.is_right
    assert found.compared_with == (6, 1)
    assert [(split.micro_batch, split.accum_steps, split.is_right) for split in found.splits] == [
        (3, 2, False),
        (2, 3, False),
        (1, 6, False),
    ]
    assert found.splits[1].difference == pytest.approx(2.0, rel=1e-3)
    assert found.diagnosis == found.splits[0].diagnosis
    assert found.diagnosis.startswith("every gradient is 2 times as large: the loss is not divided by the accumulation")
    assert str(found).splitlines()[1] == f"3 x 2: WRONG by 100%: {found.diagnosis}"
    assert pickle.loads(pickle.dumps(found)) == found  # noqa: S301 - made here
    assert autoaccum.verify(right, 6)


def test_largest_micro_batch_can_be_given_and_others_are_compared_with_it():
    found = autoaccum.verify(wrong, 12, micro_batch=4)

    assert found.compared_with == (4, 3)
    assert [(split.micro_batch, split.accum_steps) for split in found.splits] == [(3, 4), (2, 6), (1, 12)]
    assert found.splits[1].diagnosis.startswith("every gradient is 2 times as large: the loss is not divided")


def patched():
    names = ("dropout", "batch_norm", "scaled_dot_product_attention")
    clip = nn.utils.clip_grad_norm_.__closure__[0].cell_contents
    return [*(getattr(F, name) for name in names), torch.autograd.backward, torch.optim.Optimizer.__init__, clip]


def test_torch_is_as_before_afterwards():
    before = patched()

    autoaccum.verify(right, 4)

    assert patched() == before


def test_own_exceptions_pass_and_leave_everything_as_before():
    before = patched()

    def fails(micro_batch, accum_steps):
        raise RuntimeError("my own")

    with pytest.raises(RuntimeError, match="my own"):
        autoaccum.verify(fails, 4)
    assert patched() == before


def test_a_model_that_outlives_its_calls_starts_each_without_gradients():
    model = network()

    assert autoaccum.verify(lambda micro, steps: right(micro, steps, model=model), 4)
    assert not autoaccum.verify(lambda micro, steps: wrong(micro, steps, model=model), 4)


def test_dropout_that_is_kept_counts_as_noise():
    def train(micro_batch, accum_steps, divide=True, p=0.002):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 256), nn.Dropout(p), nn.Linear(256, 5))
        loop(micro_batch, accum_steps, accum_steps if divide else 1, model=model)

    kept = autoaccum.verify(train, 8, keep_dropout=True)
    assert kept, str(kept)
    assert kept.noise > 1e-3
    assert "two equal runs differ" in kept.notes[0]
    assert not autoaccum.verify(lambda micro, steps: train(micro, steps, divide=False), 8, keep_dropout=True)
    assert autoaccum.verify(train, 8).noise == 0


@pytest.mark.parametrize("kind", ["attention", "recurrent", "paths", "functional"])
def test_every_kind_of_dropout_is_taken_out(kind):
    class DropPath(nn.Module):  # as timm's
        drop_prob = 0.5

        def forward(self, x):
            return x * (torch.rand(len(x), 1, 1) >= self.drop_prob) / (1 - self.drop_prob)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(3, 8)
            self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
            self.recurrent = nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True)
            self.paths = DropPath()
            self.last = nn.Linear(16, 5)

        def forward(self, x):
            x = self.first(x.reshape(-1, 2, 3))
            if kind == "attention":
                x = self.attention(x, x, x, need_weights=False)[0]
            elif kind == "recurrent":
                x = self.recurrent(x)[0]
            elif kind == "paths":
                x = self.paths(x)
            else:
                x = F.dropout(x, 0.5)
            return self.last(x.flatten(1))

    def train(micro_batch, accum_steps):
        torch.manual_seed(0)
        right(micro_batch, accum_steps, model=Model())

    found = autoaccum.verify(train, 8)
    assert found, str(found)
    assert found.noise == 0
    with contextlib.suppress(autoaccum.InvalidInputError):  # of noise that is too large
        assert autoaccum.verify(train, 8, keep_dropout=True).noise


def test_batchnorm_is_told_and_does_not_hide_a_fault():
    def train(micro_batch, accum_steps, divide):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))
        loop(micro_batch, accum_steps, divide, model=model)

    found = autoaccum.verify(lambda micro, steps: train(micro, steps, steps), 8)
    assert found, str(found)
    assert found.notes[0].startswith("BatchNorm1d in training mode depends on the micro-batch")
    assert "not divided" in autoaccum.verify(lambda micro, steps: train(micro, steps, 1), 8).diagnosis


def test_optimizer_that_never_steps_is_told():
    def train(micro_batch, accum_steps):
        idle = torch.optim.SGD(network().parameters(), lr=0.1)
        right(micro_batch, accum_steps)
        del idle

    found = autoaccum.verify(train, 4)

    assert found
    assert found.notes == ("SGD made no step, and was not compared",)


def muon(model):
    """Orthogonal steps for matrices, as Muon's, beside AdamW."""

    class Muon(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.02})

        @torch.no_grad()
        def step(self):
            for one in self.param_groups[0]["params"]:
                left, _, right = torch.linalg.svd(one.grad, full_matrices=False)
                one.sub_(left @ right, alpha=0.02)

    class Both:
        def __init__(self):
            matrices = [one for one in model.parameters() if one.dim() > 1]
            self.all = [Muon(matrices), torch.optim.AdamW([one for one in model.parameters() if one.dim() == 1])]

        def step(self):
            for one in self.all:
                one.step()

        def zero_grad(self):
            for one in self.all:
                one.zero_grad()

    return Both()


OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters()),
    "foreach": lambda model: torch.optim.AdamW(model.parameters(), foreach=True),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "muon": muon,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_makes_no_false_alarm_in_three_steps_and_hides_no_fault(name):
    found = autoaccum.verify(lambda micro, steps: right(micro, steps, optimizer=OPTIMIZERS[name]), 8, steps=3)
    assert found, str(found)
    assert not autoaccum.verify(lambda micro, steps: wrong(micro, steps, optimizer=OPTIMIZERS[name]), 8)


def test_float64_is_compared_more_strictly():
    def train(micro_batch, accum_steps, dtype):
        x, y = samples()
        divide = accum_steps * (1 + (1e-5 if accum_steps > 1 else 0))
        loop(micro_batch, accum_steps, divide, model=network().to(dtype), data=[x.to(dtype), y])

    assert autoaccum.verify(lambda micro, steps: train(micro, steps, torch.float32), 4)
    assert not autoaccum.verify(lambda micro, steps: train(micro, steps, torch.float64), 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_false_alarm(dtype):
    def train(micro_batch, accum_steps, divide):
        x, y = samples()
        loop(micro_batch, accum_steps, divide, model=network().to(dtype), data=[x.to(dtype), y])

    found = autoaccum.verify(lambda micro, steps: train(micro, steps, steps), 8)
    assert found, str(found)
    assert "not divided" in autoaccum.verify(lambda micro, steps: train(micro, steps, 1), 8).diagnosis


def test_frozen_tied_and_sparse_parameters_are_compared():
    def train(micro_batch, accum_steps, divide):
        torch.manual_seed(0)
        embedding = nn.Embedding(20, 4, sparse=True)
        body, out = nn.Linear(4, 4), nn.Linear(4, 5)
        body.weight.requires_grad_(False)
        out_again = nn.Linear(4, 5)
        out_again.weight = out.weight
        model = nn.ModuleList([embedding, body, out, out_again])
        model.forward = lambda x: out(body(embedding(x))) + out_again(body(embedding(x)))
        tokens = torch.arange(64) % 20
        optimizer = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)  # noqa: E731
        loop(micro_batch, accum_steps, divide, model=model, data=[tokens, samples()[1]], optimizer=optimizer)

    assert autoaccum.verify(lambda micro, steps: train(micro, steps, steps), 8)
    assert "not divided" in autoaccum.verify(lambda micro, steps: train(micro, steps, 1), 8).diagnosis


def test_model_without_a_module_is_compared_by_its_gradients():
    def train(micro_batch, accum_steps, divide):
        weight = torch.ones(6, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for number, (x, _) in enumerate(micro_batches(micro_batch), 1):
            ((x @ weight).square().mean() / divide).backward()
            if number % accum_steps == 0:
                optimizer.step()
                optimizer.zero_grad()

    assert autoaccum.verify(lambda micro, steps: train(micro, steps, steps), 8)
    assert "not divided" in autoaccum.verify(lambda micro, steps: train(micro, steps, 1), 8).diagnosis


# --- what cannot be said ----------------------------------------------------------------------------------------------


def ignores_both(micro_batch, accum_steps):
    right(8, 1)


def ignores_micro_batch(micro_batch, accum_steps):
    right(8, accum_steps)


def makes_nan(micro_batch, accum_steps):
    right(micro_batch, accum_steps, loss_of=lambda outputs, y: F.cross_entropy(outputs, y) * float("nan"))


def clears_before_it_steps(micro_batch, accum_steps):
    loop(micro_batch, accum_steps, accum_steps, after=lambda model, is_last: model.zero_grad())


def draws_in_its_model(micro_batch, accum_steps):
    model = network()
    body = model.forward
    model.forward = lambda x: body(x + torch.randn_like(x))
    right(micro_batch, accum_steps, model=model)


def has_no_seed(micro_batch, accum_steps):
    torch.seed()
    model = nn.Linear(6, 5)
    nn.init.normal_(model.weight)
    loop(micro_batch, accum_steps, accum_steps, model=model)


def steps_by_itself(micro_batch, accum_steps):
    model = network()
    F.cross_entropy(model(samples()[0]), samples()[1]).backward()
    for one in model.parameters():
        one.data -= one.grad


@pytest.mark.parametrize(
    ("train", "target", "options", "text"),
    [
        (ignores_both, 8, {}, "4 x 2 passes as many samples at once as 8 x 1: micro_batch is ignored"),
        (ignores_micro_batch, 8, {}, "4 x 2 passes as many samples at once as 8 x 1: micro_batch is ignored"),
        (makes_nan, 8, {}, r"gradients are NaN or infinite \(8 x 1, step 1, 0 and 3\)|gradients are NaN or infinite"),
        (clears_before_it_steps, 8, {}, r"every gradient is 0 \(8 x 1\); perhaps the loop clears them before it steps"),
        (
            draws_in_its_model,
            8,
            {},
            r"too much .* fix the seed .*; a model that draws random numbers by itself cannot be",
        ),
        (has_no_seed, 8, {}, r"two equal runs \(8 x 1\) differ by \d+%, too much .* fix the seed"),
        (steps_by_itself, 8, {}, "train, run as 8 x 1, made 0 of 1 steps of a torch.optim.Optimizer"),
        (right, 32, {"steps": 3}, "train, run as 32 x 1, made 2 of 3 steps"),
        (right, 1, {}, "target_batch=1 can be split in one way"),
        (right, 12, {"micro_batch": 1}, "target_batch=12 can be split in one way"),
        (right, 0, {}, "target_batch must be at least 1"),
        (right, 8, {"micro_batch": 0}, "micro_batch must be at least 1"),
        (right, 8, {"steps": 0}, "steps must be at least 1"),
        (right, 8, {"keep_dropout": 1}, "keep_dropout=1 is unknown"),
        (3, 8, {}, "train=3 cannot be called"),
        (lambda micro_batch: None, 8, {}, "train=.* is called with"),
    ],
)
def test_what_nothing_can_be_said_of_is_one_sentence(train, target, options, text):
    with pytest.raises(autoaccum.InvalidInputError, match=text) as raised:
        autoaccum.verify(train, target, **options)
    assert "\n" not in str(raised.value)


def test_gradient_that_only_parts_have_is_told_in_numbers_that_json_has():
    def train(micro_batch, accum_steps):
        model, idle = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (model, idle)]
        for _ in range(accum_steps):
            outputs = model(torch.ones(micro_batch, 2)) + (accum_steps > 1) * idle(torch.ones(micro_batch, 2))
            (outputs.mean() / accum_steps + 0.0 * idle.weight.sum()).backward()
        for one in optimizers:
            one.step()

    found = autoaccum.verify(train, target_batch=4)

    assert not found
    json.dumps(found.to_dict(), allow_nan=False)
