"""What an unknown loss runs over is found out on a few samples, without a trace, and what cannot be is said once."""

import contextlib
import copy
import importlib
import itertools
from contextlib import nullcontext

import pytest
import torch
from autoaccum._loss.observation import Run
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum._data.batches import as_window
from autoaccum._engine.savepoint import Savepoint
from autoaccum._loss.objective import Objective
from autoaccum._loss.weighting import Over
from autoaccum._system.notices import Notices
from autoaccum.errors import InvalidInputError
from faults import InterruptAtLine
from helpers import CPU


class Asked:
    """An objective that settles on one window after another, in halves of unequal size, and what it said."""

    def __init__(self, model, loss, **options):
        self.notices = Notices(silent=True)
        settings = {"forward": None, "loss_reduction": None} | options
        self.objective = Objective(model, loss, notices=self.notices, **settings)
        self.mark = Savepoint(self.objective.modules, CPU)
        self.runs = 0
        model.register_forward_pre_hook(self._count)

    def _count(self, *_):
        self.runs += 1

    def settle(self, *windows, sizes=None, autocast=nullcontext):
        for window in map(as_window, windows):
            third = window.samples // 3
            self.objective.settle(window, sizes or (third, window.samples - third), unmoved, self.mark, autocast)
        return self

    @property
    def found(self):
        how = self.objective.weighting("loss")
        return how.over, how.ignore_index

    def said(self, text):
        return sum(text in one for one in self.notices.texts)


def unmoved(batch):
    return batch


def rows(classes, samples=24):
    return torch.randn(samples, 4), torch.as_tensor(classes)[torch.arange(samples) % len(classes)]


def plain(outputs, targets):
    return functional.cross_entropy(outputs, targets)


def test_question_is_answered_once_and_costs_no_further_run():
    asked = Asked(nn.Linear(4, 3), plain).settle(rows([0, 1, 1, 2]))
    runs = asked.runs

    asked.settle(*[rows([0, 1, 1, 2])] * 5)

    assert runs <= 10  # of which seven compare gradients
    assert asked.runs == runs
    assert asked.found[0] is Over.COUNTED


class Tight(nn.Linear):
    """Runs out of memory for more samples than fit."""

    fits = 4

    def forward(self, inputs):
        if len(inputs) > self.fits:
            raise torch.OutOfMemoryError(f"simulated: {len(inputs)} samples")
        return super().forward(inputs)


def settled_after_lacks(asked, window):
    """Settle as a window does that is begun again; return how often memory has run out."""
    for lacks in range(4):
        with contextlib.suppress(torch.OutOfMemoryError):
            asked.settle(window)
            return lacks
    pytest.fail("memory runs out again and again")


@pytest.mark.parametrize("fits", [16, 8, 4, 2])
def test_after_lack_of_memory_fewer_samples_are_asked_with(fits):
    model = Tight(4, 3)
    model.fits = fits
    asked = Asked(model, plain)

    lacks = settled_after_lacks(asked, rows([0, 1, 1, 2, -100, -100, -100], 96))

    assert (lacks > 0) == (fits < 3)
    assert asked.found == (Over.COUNTED, -100)
    assert asked.said("memory ran out") == 0


def test_after_lack_of_memory_with_two_samples_their_outputs_stay_in_their_type():
    def tight(outputs, targets):
        if outputs.dtype is torch.float64:
            raise torch.OutOfMemoryError("simulated: no float64")
        return functional.cross_entropy(outputs, targets)

    asked = Asked(nn.Linear(4, 3), tight)

    assert settled_after_lacks(asked, rows([0, 1, 1, 2, -100, -100, -100], 96)) == 2
    assert asked.found[0] is Over.COUNTED
    assert asked.said("memory ran out") == 0


def of_first(model, batch):
    return model(batch[0])


def of_second(outputs, batch):
    return functional.cross_entropy(outputs, batch[1] if isinstance(batch, list) else batch)


@pytest.mark.parametrize("numbers", [range(96), [*range(48), *range(48)]], ids=["index", "classes"])
def test_index_of_samples_is_no_target_that_a_loss_may_ignore(numbers):
    asked, calls = [], []
    for with_numbers in (False, True):
        torch.manual_seed(0)
        drawn = torch.as_tensor(numbers)[torch.randperm(96)]
        inputs, classes = torch.randn(96, 4), torch.arange(96) % 3
        columns = [inputs, classes, *([drawn] if with_numbers else [])]
        asked.append(Asked(nn.Linear(4, 3), of_second, forward=of_first))
        asked[-1].settle(*[[column[rows] for column in columns] for rows in torch.arange(96).split(24)])
        calls.append(asked[-1].runs)

    assert (calls[1] == calls[0]) == (len(set(numbers)) == 96)  # numbers that are not all different may be classes


@pytest.mark.parametrize("alone", [False, True], ids=["samples", "samples that cannot be joined"])
def test_asking_leaves_no_trace(alone):
    class Moving(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(1, 3)
            self.norm = nn.BatchNorm1d(3)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, inputs):
            self.calls += 1
            inputs.add_(torch.rand(()))
            return self.norm(self.body(inputs.mean(1, keepdim=True)))

    pieces = [(torch.randn(1, n), torch.tensor([n % 3])) for n in (2, 3, 4)] if alone else [rows([0, 1, 2])]
    window, model = autoaccum.Window(pieces), Moving()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs, random = [piece[0].clone() for piece in pieces], torch.get_rng_state()

    asked = Asked(model, plain).settle(window, sizes=(1, 1, 1) if alone else (8, 16))

    assert asked.runs
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close([piece[0] for piece in pieces], inputs, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.norm.training


def test_loss_may_write_to_what_it_is_given():
    def writing(outputs, targets):
        targets.sub_(1)  # done twice it would be no class
        outputs.mul_(2.0)
        return functional.cross_entropy(outputs, targets, ignore_index=1)

    asked = Asked(nn.Linear(4, 3), writing).settle(rows([1, 2, 2, 3, 1]))

    assert asked.found == (Over.COUNTED, 2)
    assert asked.runs <= 9  # and not once for each part


# --- class weights ----------------------------------------------------------------------------------------------------

WEIGHTED = {
    "all": [0.2, 1.0, 3.0, 0.5],
    "one": [1.0, 1.0, 1.0, 0.1],
}


@pytest.mark.parametrize("weights", WEIGHTED.values(), ids=WEIGHTED)
@pytest.mark.parametrize("padded", [False, True])
def test_class_weights_in_a_plain_function_are_weighed_by_samples_and_that_is_said_once(weights, padded):
    inputs, targets = rows([0, 1, 2, 3, 3, 1, 0])
    if padded:
        targets[::5] = -100

    def weighted(outputs, targets):
        return functional.cross_entropy(outputs, targets, weight=torch.tensor(weights))

    asked = Asked(nn.Linear(4, 4), weighted).settle(*[(inputs, targets)] * 3)

    assert asked.found[0] is Over.OPAQUE
    assert asked.said("could not be inferred, so") == 1


def inverse_counts(outputs, targets):
    counts = torch.bincount(targets, minlength=outputs.shape[1]).clamp(min=1)
    return functional.cross_entropy(outputs, targets, weight=1 / counts.to(outputs.dtype))


def effective_counts(outputs, targets):
    counts = torch.bincount(targets, minlength=outputs.shape[1]).to(outputs.dtype)
    weights = 0.1 / (1 - 0.9**counts)
    return (functional.cross_entropy(outputs, targets, reduction="none") * weights[targets]).mean()


@pytest.mark.parametrize("loss", [inverse_counts, effective_counts])
@pytest.mark.parametrize("sizes", [(5, 5, 5, 5, 4), (8, 8, 8), (12, 12)])
def test_weights_from_the_counts_of_classes_in_a_batch_are_told_in_the_first_window(loss, sizes):
    """A few samples, each of another class, show a plain mean."""
    asked = Asked(nn.Linear(4, 3), loss).settle(rows([0, 1, 2, 1]), sizes=sizes)

    assert asked.found[0] is Over.OPAQUE
    assert asked.said("could not be inferred") == 1


def test_class_that_weighs_otherwise_and_comes_late_is_noticed():
    def weighted(outputs, targets):
        return functional.cross_entropy(outputs, targets, weight=torch.tensor([1.0, 1.0, 1.0, 0.1]))

    asked = Asked(nn.Linear(4, 4), weighted).settle(rows([0, 1, 2]))
    assert asked.found[0] is Over.COUNTED

    asked.settle(rows([0, 1, 2, 2, 3]))

    assert asked.found[0] is Over.OPAQUE


def test_many_classes_are_all_looked_at():
    asked = Asked(nn.Linear(4, 100), plain).settle(rows(list(range(100)), 300))

    runs = asked.runs
    asked.settle(rows(list(range(100)), 300))

    assert runs < 20  # of 16 samples each
    assert asked.runs == runs
    assert not asked.notices.texts


# --- half precision and autocast --------------------------------------------------------------------------------------


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, tokens):
        return self.head(self.embed(tokens)).transpose(1, 2)


def sentences(padding, samples=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(1, 5, (samples, 7), generator=generator)
    for row, length in enumerate(torch.randint(1, 8, (samples,), generator=generator).tolist()):
        targets[row, length:] = padding
    return torch.randint(0, 11, (samples, 7), generator=generator), targets


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_plain_function_is_found_out_whatever_precision_the_model_is_in(dtype, seed):
    torch.manual_seed(seed)

    def shifted(outputs, targets):
        return functional.cross_entropy(outputs[..., :-1], targets[:, 1:], ignore_index=0)

    asked = Asked(Tagger().to(dtype), shifted).settle(sentences(0, seed=seed))

    assert asked.found == (Over.SHIFTED, 0)


@pytest.mark.parametrize("seed", range(10))
def test_own_loss_in_bfloat16_is_found_out_or_it_is_said_that_it_cannot_be_told(seed):
    class Own(Tagger):
        def forward(self, tokens, labels):
            return {"loss": functional.cross_entropy(super().forward(tokens), labels)}

    torch.manual_seed(seed)
    tokens, labels = sentences(-100, seed=seed)

    asked = Asked(Own().bfloat16(), None).settle(*[{"tokens": tokens, "labels": labels}] * 2)

    assert asked.found == (Over.COUNTED, -100) or asked.said("do not determine its reduction") == 1


def test_function_that_holds_tensors_in_single_precision_is_asked_in_that():
    scale = nn.Linear(3, 3)

    def mixed(outputs, targets):
        return functional.cross_entropy(scale(outputs), targets, ignore_index=2)

    asked = Asked(nn.Linear(4, 3), mixed).settle(rows([0, 1, 2, 2, 1]))

    assert asked.found == (Over.COUNTED, 2)
    assert asked.runs <= 12  # with its gradients, and not once for each part


class Frozen(nn.Module):
    """A backbone in bfloat16 under a head in float32: without autocast the two do not go together."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 8).bfloat16().requires_grad_(requires_grad=False)
        self.head = nn.Linear(8, 5)

    def forward(self, inputs):
        return self.head(self.body(inputs))


class Narrow(Frozen):
    """Gives its head bfloat16 whatever the types of its parameters are."""

    def forward(self, inputs):
        return self.head(self.body(inputs).bfloat16())


def test_model_of_two_types_is_asked_with_copies_in_float32():
    def ignoring(outputs, targets):
        return functional.cross_entropy(outputs, targets, ignore_index=0)

    asked = Asked(Frozen(), ignoring).settle(rows([0, 1, 2, 3, 4, 0, 0]))

    assert asked.found == (Over.COUNTED, 0)


def test_model_that_needs_autocast_is_asked_under_it():
    def autocast():
        return torch.autocast("cpu", dtype=torch.bfloat16)

    def ignoring(outputs, targets):
        return functional.cross_entropy(outputs, targets, ignore_index=0)

    window = rows([0, 1, 2, 3, 4, 0, 0])

    without = Asked(Narrow(), ignoring).settle(window)
    within = Asked(Narrow(), ignoring).settle(window, autocast=autocast)

    assert without.said("could not be inferred") == 0
    with autocast():
        without.objective.terms(without.objective.sources[0], window, 24)
    assert without.said("could not be inferred in evaluation mode") == 1
    assert within.found == (Over.COUNTED, 0)


# --- what cannot be told ----------------------------------------------------------------------------------------------


def test_loss_that_compares_samples_with_each_other_is_weighed_by_samples_and_that_is_said_once():
    def contrastive(outputs, targets):
        return functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))

    asked = Asked(nn.Linear(4, 3), contrastive).settle(*[rows([0, 1, 2])] * 3)

    assert asked.found[0] is Over.OPAQUE
    assert asked.said("could not be inferred") == 1


def test_losses_that_are_all_alike_are_told_apart_by_their_gradients():
    def ignoring(outputs, targets):
        return functional.cross_entropy(outputs, targets, ignore_index=0)

    model, window = Tagger(), sentences(0)
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)

    asked = Asked(model, ignoring).settle(window)

    assert asked.found == (Over.COUNTED, 0)


def test_losses_that_are_all_alike_are_asked_about_again_when_the_model_has_moved():
    def ignoring(outputs, targets):
        return functional.cross_entropy(outputs, targets, ignore_index=0)

    model, window = Tagger().requires_grad_(False), sentences(0)  # without gradients, only values tell
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    asked = Asked(model, ignoring).settle(window)
    assert asked.found == (Over.COUNTED, -100)  # the likeliest
    nn.init.normal_(model.head.weight)

    asked.settle(window)

    assert asked.found == (Over.COUNTED, 0)


def test_losses_that_stay_alike_are_given_up_and_that_is_said_once():
    model = nn.Linear(4, 3).requires_grad_(False)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)

    asked = Asked(model, plain).settle(*[rows([0, 1, 2, 1, 1, 0])] * 10)

    assert asked.said("do not determine its reduction") == 1
    assert asked.runs < 40


def test_samples_that_cannot_stand_in_one_batch_weigh_by_samples_and_that_is_said_once():
    def window(*lengths):
        return autoaccum.Window([(torch.randint(0, 11, (1, n)), torch.randint(0, 5, (1, n))) for n in lengths])

    asked = Asked(Tagger(), plain).settle(window(3, 4, 5), window(2, 6, 1), sizes=(1, 1, 1))

    assert asked.found[0] is Over.OPAQUE
    assert asked.runs < 4  # it is not asked again and again
    assert asked.said("no two samples of a window can be batched together") == 1

    asked.settle(sentences(-100))

    assert asked.found == (Over.COUNTED, -100)


@pytest.mark.parametrize("sizes", [(4, 4, 4, 3), (5, 5, 5)])
def test_samples_in_which_nothing_counts_are_not_asked_about_alone(sizes):
    targets = torch.arange(15) % 3
    targets[5:11] = -100

    asked = Asked(nn.Linear(4, 3), plain).settle((torch.randn(15, 4), targets), sizes=sizes)

    assert asked.found == (Over.COUNTED, -100)
    assert asked.said("batched together") == 0


def test_loss_that_is_never_finite_is_told_as_such():
    asked = Asked(nn.Linear(4, 3), lambda outputs, targets: outputs.mean() * float("nan")).settle(rows([0, 1, 2]))

    assert asked.found[0] is Over.OPAQUE
    assert asked.said("is not finite for any few samples") == 1
    assert asked.said("batched together") == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("own", [False, True])
def test_loss_in_float64_that_sums_in_float32_is_found_out(own, dtype):
    trainer = pytest.importorskip("transformers.trainer_pt_utils")
    smoother = trainer.LabelSmoother(0.1)

    class Smoothed(Tagger):
        def forward(self, tokens, labels=None):
            outputs = {"logits": super().forward(tokens).transpose(1, 2)}
            return outputs if labels is None else {"loss": smoother(outputs, labels)}

    torch.manual_seed(0)
    tokens, labels = sentences(-100)
    loss = None if own else lambda outputs, batch: smoother(outputs, batch["labels"])
    model = Smoothed().to(dtype)
    forward = None if own else lambda model, batch: model(batch["tokens"])

    asked = Asked(model, loss, forward=forward).settle({"tokens": tokens, "labels": labels})

    assert asked.found == (Over.COUNTED, -100)


# --- where nothing counts in an unknown loss --------------------------------------------------------------------------


def weighted_and_padded(outputs, targets):
    return functional.cross_entropy(outputs, targets, weight=torch.tensor([0.2, 1.0, 3.0, 0.5, 9.0]), ignore_index=0)


@pytest.mark.parametrize("loss_reduction", [None, "mean"])
def test_micro_batch_in_which_nothing_counts_is_left_out_of_a_loss_that_is_not_known(loss_reduction):
    inputs, targets = sentences(0)
    targets[4:6] = 0
    asked = Asked(Tagger(), weighted_and_padded, loss_reduction=loss_reduction)

    asked.settle((inputs, targets), sizes=(4, 2, 6))

    factors = asked.objective.factors(as_window((inputs, targets)), (4, 2, 6))
    assert [factor.of("loss") for factor in factors] == [4 / 12, 0.0, 6 / 12]
    assert asked.said("is NaN when all targets are ignored") == 1


def test_micro_batch_with_all_targets_alike_stays_where_its_loss_is_a_number():
    inputs, targets = sentences(0)
    targets[4:6] = 3
    asked = Asked(Tagger(), weighted_and_padded).settle((inputs, targets), sizes=(4, 2, 6))
    runs = asked.runs

    asked.settle((inputs, targets), sizes=(4, 2, 6))

    factors = asked.objective.factors(as_window((inputs, targets)), (4, 2, 6))
    assert [factor.of("loss") for factor in factors] == [4 / 12, 2 / 12, 6 / 12]
    assert asked.runs == runs  # it was tried once


def test_unknown_loss_trains_through_a_micro_batch_in_which_nothing_counts():
    inputs, targets = sentences(0)
    targets[4:6] = 0
    model = Tagger()
    runner = autoaccum.Runner(
        model,
        None,
        autoaccum.Plan(12, (4, 2, 6)),
        loss=weighted_and_padded,
        device="cpu",
        notices=Notices(silent=True),
    )

    report = runner.step((inputs, targets))

    assert report.loss > 0.0
    assert all(bool(p.isfinite().all()) for p in model.parameters())


# --- pairs that are none ----------------------------------------------------------------------------------------------


def accuracy(outputs, targets):
    """Often 0 for a few samples, which then add up."""
    return functional.cross_entropy(outputs, targets), (outputs.argmax(1) == targets).double().mean()


def mean_and_count(outputs, targets):
    return functional.cross_entropy(outputs, targets), len(targets)


def with_outputs(outputs, targets):
    return functional.cross_entropy(outputs, targets), outputs


def with_mapping(outputs, targets):
    return functional.cross_entropy(outputs, targets), {"accuracy": 0.5}


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (accuracy, "second halves do not add up"),
        (mean_and_count, "first half is a mean"),
        (with_outputs, r"second half is a tensor of shape \("),
        (with_mapping, "second half is a dict"),
    ],
)
@pytest.mark.parametrize("as_list", [False, True])
def test_pair_that_is_no_sum_and_weight_is_refused_before_the_first_update(loss, found, as_list):
    model = nn.Linear(4, 3)
    before = model.weight.detach().clone()
    losses = [lambda model, batch: loss(model(batch[0]), batch[1])] if as_list else loss
    runner = autoaccum.Runner(model, None, autoaccum.plan(24, 9), loss=losses, device="cpu")

    with pytest.raises(autoaccum.InvalidInputError, match=rf"{found}.*a pair means \(sum, weight\)"):
        runner.step(rows([0, 1, 2]))

    assert torch.equal(model.weight, before)


def test_pair_that_is_none_is_refused_in_a_window_that_is_not_cut_once_it_was_seen():
    runner = autoaccum.Runner(nn.Linear(4, 3), None, autoaccum.plan(24, 24), loss=accuracy, device="cpu")
    runner.step(rows([0, 1, 2]))

    with pytest.raises(autoaccum.InvalidInputError, match="second halves do not add up"):
        runner.step(rows([0, 1, 2]))


def test_probe_shows_a_pair_that_is_none_before_training_begins():
    with pytest.raises(autoaccum.InvalidInputError, match="second halves do not add up"):
        autoaccum.fit(nn.Linear(4, 3), [rows([0, 1, 2])], 24, loss=accuracy, device="cpu", progress=False)


def test_memory_that_runs_out_between_two_losses_leaves_none_of_them_unlearned(monkeypatch):
    def two(outputs, targets):
        loss = functional.cross_entropy(outputs, targets, reduction="sum")
        return {"pair": (loss, len(targets)), "mean": functional.cross_entropy(outputs, targets)}

    reads = torch.Tensor.__float__
    failures = 0
    while True:
        asked = Asked(nn.Linear(4, 3), two)
        monkeypatch.setattr(torch.Tensor, "__float__", FailsAt(failures + 1, reads))
        try:
            asked.settle(rows([0, 1, 1, 2]))
        except torch.OutOfMemoryError:
            failures += 1
            asked.settle(rows([0, 1, 1, 2]))
        else:
            break
        assert asked.objective.weighting("pair").over is Over.PAIR
        assert asked.objective.weighting("mean").over is Over.COUNTED
    assert failures > 20


class FailsAt:
    """A function that once finds no memory."""

    def __init__(self, call, function):
        self.left, self.function = call, function

    def __get__(self, owner, kind=None):
        return lambda *arguments: self(owner, *arguments)

    def __call__(self, *arguments):
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB. (injected)")
        return self.function(*arguments)


def test_penalty_on_a_gradient_of_the_model_is_asked_for_with_graphs():
    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, inputs, labels):
            inputs = inputs.clone().requires_grad_()
            outputs = self.body(inputs)
            (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
            return {"loss": outputs.square().mean() + slope.square().sum(1).mean()}

    notices = Notices(silent=True)
    runner = autoaccum.Runner(Critic(), None, autoaccum.plan(8, 4), device="cpu", precision="fp32", notices=notices)

    runner.step({"inputs": torch.randn(8, 4), "labels": torch.arange(8)})

    assert [text for text in notices.texts if "could not be inferred" in text] == []


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda outputs, targets: (outputs - targets) ** 2, r"shape \(4, 1\)"),
        (lambda outputs, targets: None, "NoneType"),
    ],
)
def test_what_is_no_loss_is_said_once_by_the_error_alone(capsys, loss, found):
    batches = [(torch.randn(8, 3), torch.randn(8, 1))]

    with pytest.raises(InvalidInputError, match=found):
        autoaccum.fit(nn.Linear(3, 1), batches, 8, loss=loss, micro_batch=4, device="cpu")

    assert "loss_reduction=" not in capsys.readouterr().err


def test_interrupt_between_any_two_lines_leaves_the_compiler_as_it_was():
    """A compiler that was told to run eagerly, and never told otherwise, would not compile from then on."""
    importlib.import_module("torch._dynamo")
    asked = Asked(nn.Linear(4, 3), plain)
    run, interrupted = Run(asked.objective, unmoved, asked.mark, nullcontext), []

    for package in ("_loss", "_system"):
        for point in itertools.count(1):
            try:
                with InterruptAtLine(package, point) as interrupt, run.without_trace():
                    pass
            except KeyboardInterrupt as error:
                interrupted.append(error)  # its traceback keeps every block alive that was not left
            asked.objective.put_back_modes()
            assert torch._dynamo.eval_frame._stance.stance == "default", interrupt.where
            if not interrupt.hits:
                break

    assert len(interrupted) > 40


def test_micro_batches_in_which_nothing_counts_are_left_out_of_later_windows_too():
    """The loss is divided by what counts in its micro-batch, which later windows show anew, or not."""

    def loss(outputs, batch):
        each = functional.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        return each.sum() / (batch["labels"] != -100).sum()

    def part(samples, width, counts, seed):
        tokens = torch.randint(9, (samples, width), generator=torch.Generator().manual_seed(seed))
        labels = tokens.clone() if counts else torch.full_like(tokens, -100)
        labels[0, 3:] = -100
        return {"input": tokens, "labels": labels}

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)).double()
    window = [part(3, 4, counts=False, seed=0), part(2, 5, counts=True, seed=1)]
    plain = copy.deepcopy(model)

    autoaccum.fit(
        model,
        window * 3,
        5,
        micro_batch=2,
        loss=loss,
        forward=lambda model, batch: model(batch["input"]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        device="cpu",
        cache=False,
        progress=False,
    )

    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss(plain(window[1]["input"]), window[1]).backward()
        optimizer.step()
    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()), rtol=1e-12, atol=1e-12)
