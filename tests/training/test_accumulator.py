"""The gradient of a batch is added to `.grad` once, whatever micro-batches it took and whatever failed in between."""

import copy
import os
import subprocess
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum._sizing.cache import Key  # an entry of the cache
from support.faults.modes import FailAt, InterruptAt
from support.frameworks.jobs import FRAMEWORKS
from support.models.small import a_few_of, assert_bitwise, state_of
from support.processes import fork_server
from support.processes.folders import SUPPORT, TESTS
from support.training.starts import Wide, rows, started

SAMPLES, CLASSES = 12, 3


class Failing(nn.Module):
    """Lacks memory where more samples come at once than `most`."""

    def __init__(self, most=None, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(dropout), nn.Linear(7, CLASSES)
        ).double()
        self.most = most
        self.body[1].eval()

    def forward(self, inputs):
        if self.most is not None and len(inputs) > self.most:
            raise torch.OutOfMemoryError("told to")
        return self.body(inputs)


def batch(seed=0, samples=SAMPLES):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(CLASSES, (samples,), generator=generator)
    targets[: samples // 3] = -100  # so that micro-batches weigh differently
    return torch.randn(samples, 5, generator=generator, dtype=torch.float64), targets


def accumulator(model, loss=None, **options):
    settings = {"device": autoaccum.Simulated("1GiB"), "precision": "fp32"}
    if "closure" not in options:
        options["loss"] = loss or nn.CrossEntropyLoss()
    return autoaccum.Accumulator(model, **(settings | options))


def gradients(model):
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


def of_whole(*batches, loss=functional.cross_entropy, model=None):
    model = model or Failing()
    for inputs, targets in batches:
        loss(model(inputs), targets).backward()
    return gradients(model)


def assert_equal_gradients(model, expected):
    torch.testing.assert_close(gradients(model), expected, rtol=1e-12, atol=1e-14)


def half_of_classes(outputs, targets):
    """A (sum, weight) pair, of which the weight is not known before the pass."""
    weights = (targets % 2 == 1).double() + 0.5
    return (functional.cross_entropy(outputs, targets.clamp(0), reduction="none") * weights).sum(), weights.sum()


LOSSES = {
    "mean over counted targets": functional.cross_entropy,
    "module": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "per sample": lambda outputs, targets: functional.cross_entropy(outputs, targets.clamp(0), reduction="none"),
    "pair": half_of_classes,
    "several": lambda outputs, targets: {
        "one": functional.cross_entropy(outputs, targets),
        "two": outputs.square().mean(),
    },
}


# --- the gradient -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batch", [12, 5, 1, "auto"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_gradient_of_a_batch_is_that_of_one_backward_pass(micro_batch, loss):
    def whole(outputs, targets):
        found = loss(outputs, targets)
        if isinstance(found, dict):
            return sum(found.values())
        return found[0] / found[1] if isinstance(found, tuple) else found.mean()

    model = Failing()
    report = accumulator(model, loss, micro_batch=micro_batch).backward(batch())

    assert_equal_gradients(model, of_whole(batch(), loss=whole))
    assert sum(report.micro_batches) == report.samples == SAMPLES
    assert report.loss == pytest.approx(whole(Failing()(batch()[0]), batch()[1]).item(), rel=1e-12)


@pytest.mark.parametrize("most", [None, 4])
def test_two_batches_add_up_in_grad_as_two_backward_passes_do(most):
    model = Failing(most)
    accumulating = accumulator(model, micro_batch=12)

    first, second = accumulating.backward(batch(0)), accumulating.backward(batch(1))

    assert_equal_gradients(model, of_whole(batch(0), batch(1)))
    assert (first.oom_events > 0) == (most is not None)
    assert second.oom_events == 0


def test_sequence_of_batches_is_one_batch():
    model = Failing()
    pieces = [(inputs, targets) for inputs, targets in zip(*(half.split(4) for half in batch()), strict=True)]

    accumulator(model, micro_batch=5).backward(pieces)

    assert_equal_gradients(model, of_whole(batch()))


def test_loss_over_the_whole_batch_is_exact():
    def contrastive(outputs, targets):
        near = functional.normalize(outputs) @ functional.normalize(outputs).T
        return functional.cross_entropy(near, targets.clamp(0))

    model = Failing(most=5)
    accumulating = accumulator(model, contrastive, loss_scope="window")
    for _ in range(2):
        report = accumulating.backward(batch(), keep="outputs")

    assert_equal_gradients(model, of_whole(batch(), batch(), loss=contrastive))
    assert max(report.micro_batches) <= 5
    torch.testing.assert_close(torch.cat(report.outputs), Failing()(batch()[0]).detach())


def test_dictionaries_are_exact_in_every_batch_also_where_the_loss_changes():
    """Of these batches all but four take the short path."""
    model, terms = Failing(), 1

    def loss(outputs, targets):
        return functional.cross_entropy(outputs, targets) + (outputs.square().mean() if terms > 1 else 0.0)

    accumulating = accumulator(model, closure=lambda part: loss(model(part["in"]), part["out"]), micro_batch=5)
    for number in range(14):
        terms = 1 + (number > 9)
        given = batch(number, SAMPLES if number != 6 else 7)
        named = dict(zip(("in", "out"), given, strict=True))
        accumulating.backward(dict(reversed(named.items())) if number == 5 else named)

        assert_equal_gradients(model, of_whole(given, loss=loss))
        model.zero_grad()


def test_compiled_model_gets_the_same_gradient():
    model = Failing()
    model.compile(backend="aot_eager")
    accumulator(model, micro_batch=6).backward(batch())

    assert_equal_gradients(model, of_whole(batch()))


# --- what the user's own loop brings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["scaler", "function"])
def test_gradients_stay_scaled_for_a_scaler_of_the_users_own(kind):
    model, plain = Failing(most=5), Failing()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scale = scaler if kind == "scaler" else lambda loss: loss * 1024.0

    report = accumulator(model, scale=scale).backward(batch())
    scaler.scale(functional.cross_entropy(plain(batch()[0]), batch()[1])).backward()

    assert_equal_gradients(model, gradients(plain))
    assert report.loss == pytest.approx(functional.cross_entropy(plain(batch()[0]), batch()[1]).item())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler.unscale_(optimizer)
    torch.testing.assert_close(gradients(model), of_whole(batch()))
    scaler.step(optimizer)
    scaler.update()


def test_autocast_of_the_users_own_stays_in_force():
    model, seen = nn.Linear(5, CLASSES), []
    model.register_forward_hook(lambda *given: seen.append(given[2].dtype) if model.training else None)
    inputs, targets = batch()
    accumulating = accumulator(model, precision="auto")
    double = {torch.float64}  # in which gradients are compared

    with torch.autocast("cpu", torch.bfloat16):
        accumulating.backward((inputs.float(), targets))
    within = set(seen) - double
    seen.clear()
    accumulating.backward((inputs.float(), targets))

    assert (within, set(seen) - double) == ({torch.bfloat16}, {torch.float32})


@pytest.mark.parametrize("micro_batch", [12, 5])
def test_outputs_are_kept_in_order_where_asked_for(micro_batch):
    model = Failing(most=8)
    accumulating = accumulator(model, micro_batch=micro_batch)

    report = accumulating.backward(batch(), keep="outputs")

    assert [len(one) for one in report.outputs] == list(report.micro_batches)
    assert not any(one.requires_grad for one in report.outputs)
    torch.testing.assert_close(torch.cat(report.outputs), Failing()(batch()[0]).detach())
    assert accumulating.backward(batch()).outputs == ()


def points_of(count, every):
    """Operators at which to fail: some of those that ask what the loss runs over, which come first, and the others."""
    return sorted({*range(1, count + 1, max(1, count // 6)), *range(max(1, count - 120), count + 1, every)})


SHARES = [pytest.param(17, id="a few"), pytest.param(4, id="many", marks=pytest.mark.sweep)]


# --- closures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", SHARES)
def test_teacher_of_a_closure_moves_as_if_nothing_had_failed(every):
    def distilled(most, points=()):
        torch.manual_seed(0)
        student, teacher = Failing(most, dropout=0.3), nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).double()
        teacher.requires_grad_(requires_grad=False)

        def closure(part):
            with torch.no_grad():
                wanted = teacher(part[0])
            return functional.mse_loss(student(part[0]), wanted, reduction="sum"), len(wanted)

        distilling, given = accumulator(student, closure=closure, micro_batch=4), batch()
        with FailAt(*points) as fail:
            report = distilling.backward(given)
        return report.micro_batches, (gradients(student), teacher.state_dict(), torch.get_rng_state()), fail

    *_, fail = distilled(None)
    equal = {}
    for point in points_of(fail.count, every):
        cut, found, fail = distilled(None, [point])
        assert fail.hits == 1
        assert_bitwise(found, equal.setdefault(cut, found))
    assert (4, 4, 4) in equal
    assert_bitwise(equal[4, 4, 4], distilled(None)[1])


# --- failures ---------------------------------------------------------------------------------------------------------


class FailWhereMemoryIsNeeded(FailAt):
    """Passes over the addition to earlier gradients, which is done in place and to the end."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.overloadpacket is torch.ops.aten._foreach_add_:
            return operator(*args, **(kwargs or {}))
        return super().__torch_dispatch__(operator, types, args, kwargs)


@pytest.mark.parametrize(("loss", "has_earlier"), a_few_of(["module", "pair"], [False, True]))
@pytest.mark.parametrize("every", SHARES)
def test_memory_that_runs_out_at_any_operator_changes_no_bit_of_the_gradient(loss, has_earlier, every):
    def run(cut, *points):
        model = Failing(dropout=0.3)
        model.body[1].train()
        if has_earlier:
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = torch.full_like(parameter, float(number))
        accumulating, given = accumulator(model, LOSSES[loss], micro_batch=cut), batch()
        torch.manual_seed(3)
        with FailWhereMemoryIsNeeded(*points) as fail:
            report = accumulating.backward(given)
        return state_of(model), torch.get_rng_state(), report, fail

    plain = {}
    _, _, _, whole = run(6)
    for point in points_of(whole.count, every):
        state, random, report, fail = run(6, point)
        assert fail.hits == 1
        cut = report.micro_batches
        assert_bitwise((state, random), plain.setdefault(cut, (state, random)))
    for cut, found in plain.items():
        if len(set(cut)) == 1:
            assert_bitwise(run(max(cut))[:2], found)
    assert len(plain) > 1


@pytest.mark.parametrize("every", [pytest.param(19, id="a few"), pytest.param(1, id="all", marks=pytest.mark.sweep)])
@pytest.mark.parametrize("mode", [FailWhereMemoryIsNeeded, InterruptAt])
def test_call_that_fails_at_any_operator_leaves_everything_as_it_was(mode, every):
    class Odd(Exception):  # noqa: N818 - not named by its suffix
        pass

    def run(*points):
        model = Failing(dropout=0.3)
        model.body[1].train()
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, float(number))
        held = [parameter.grad for parameter in model.parameters()]
        accumulating, given = accumulator(model, micro_batch=5), batch()
        before, random = state_of(model), torch.get_rng_state()
        with mode(*points) if mode is InterruptAt else mode(*points, error=Odd()) as fail, suppress(*expected):
            accumulating.backward(given)
        return fail, (state_of(model), torch.get_rng_state()), (before, random), held, model

    expected = Odd, KeyboardInterrupt
    whole, done, *_ = run()
    n_done = 0
    for point in range(1, whole.count + 1, every):
        _, found, before, held, model = run(point)
        if torch.equal(found[0]["gradients"][0], before[0]["gradients"][0]):
            assert_bitwise(found, before)
            assert all(parameter.grad is one for parameter, one in zip(model.parameters(), held, strict=True))
        else:  # while gradients were compared, or the sums were written, which is done to the end
            assert_bitwise(found, done)
            n_done += 1
    assert n_done < whole.count


# --- sizes ------------------------------------------------------------------------------------------------------------


def sized(megabytes):
    device = autoaccum.Simulated(f"{megabytes}MiB")
    return autoaccum.Accumulator(Wide(), loss=nn.MSELoss(), device=device)


def test_size_is_found_while_it_trains_and_kept():
    accumulating = sized(24)
    found = [accumulating.backward(rows(64)) for _ in range(8)]

    assert found[-1].oom_events == 0
    assert 1 < max(found[-1].micro_batches) < 64
    assert 12 << 20 < found[-1].peak_bytes <= 24 << 20
    assert accumulating.plan.target_batch == 64


def cuts(accumulating, *, batches=4):
    found = []
    for _ in range(batches):
        found.append(accumulating.backward(rows(64)).micro_batches)
        accumulating._step.clear_gradients()
    return found


HOWS = ["loop", *FRAMEWORKS]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("how", HOWS)
def test_next_start_of_a_job_begins_with_the_size_that_was_found(monkeypatch, how):
    def found(batches):
        return started(how, batches, device=autoaccum.Simulated("24MiB"))

    searched, again = found(4), found(1)[0]
    monkeypatch.setenv("AUTOACCUM_CACHE_DIR", "")
    forgotten = found(1)[0]

    assert searched[0][0] < searched[-1][0] < 64
    assert (again, forgotten) == (searched[-1], searched[0])


def under_a_real_limit(how):
    command = [*fork_server.python(), str(SUPPORT / "training" / "starts.py"), how]
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.fixture(scope="module")
def without_autoaccum():
    return under_a_real_limit("plain")


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS)
def test_loop_that_dies_of_a_real_limit_ends_with_it(without_autoaccum, how):
    ours = under_a_real_limit(how)

    assert "can't allocate memory" in without_autoaccum.stderr
    assert ours.stdout.splitlines()[-1:] == ["4 batches"], ours.stderr[-3000:]


def test_batches_that_are_added_to_gradients_are_cut_smaller_for_the_memory_of_a_second_set():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 64))
    settings = {"device": autoaccum.Simulated("6MiB")}
    accumulating = autoaccum.Accumulator(model, loss=nn.MSELoss(), **settings)
    window = torch.randn(64, 64), torch.randn(64, 64)
    cut = []
    for number in range(12):
        report = accumulating.backward(window)
        cut.append(max(report.micro_batches))
        if number < 5:
            model.zero_grad()

    assert cut[11] < cut[5]
    assert report.oom_events == 0


def test_size_of_an_earlier_start_that_does_not_fit_any_more_is_searched_for_again(monkeypatch):
    monkeypatch.setattr("autoaccum._training.accumulator.key_of", lambda *_, **__: Key("0" * 64, 64, {}))
    large = cuts(sized(48))[-1]

    small, again = (cuts(sized(24)) for _ in range(2))

    assert max(small[0]) < large[0]
    assert again[0] == small[-1]


# --- bad input --------------------------------------------------------------------------------------------------------


def test_hooks_that_run_for_each_micro_batch_are_refused():
    model = Failing()
    model.body[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)

    with pytest.raises(autoaccum.InvalidInputError, match="post-accumulate-grad hook"):
        accumulator(model).backward(batch())


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize("of_module", [False, True])
@pytest.mark.parametrize(
    ("becomes", "said"),
    [
        (lambda grad: None, "cleared or replaced"),
        (torch.clone, "cleared or replaced"),
        (lambda grad: grad.mul_(0.5), r"a hook changed \.grad"),
    ],
)
def test_gradients_that_a_hook_takes_away_or_changes_are_refused(becomes, said, of_module):
    model = Failing()
    layer = model.body[0]

    def hook(*_):
        if layer.weight.grad is not None:
            layer.weight.grad = becomes(layer.weight.grad)

    _ = layer.register_full_backward_hook(hook) if of_module else layer.weight.register_hook(hook)

    with pytest.raises(autoaccum.InvalidInputError, match=said):
        accumulator(model, micro_batch=3).backward(batch())
    assert gradients(model) == [None] * 6


MEDDLING = {
    "clears them": lambda model, loss: model.zero_grad(),
    "fills them with zeros": lambda model, loss: model.zero_grad(set_to_none=False),
    "goes backward itself": lambda model, loss: loss.requires_grad and loss.backward(retain_graph=True),
    "steps an optimizer": lambda model, loss: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).zero_grad(),
}


@pytest.mark.parametrize("meddle", MEDDLING.values(), ids=MEDDLING)
def test_closure_that_changes_gradients_is_refused_and_earlier_ones_stay(meddle):
    model = Failing()
    accumulator(model).backward(batch(1))
    before = gradients(model)

    def closure(part):
        loss = functional.cross_entropy(model(part[0]), part[1])
        meddle(model, loss)
        return loss

    with pytest.raises(autoaccum.InvalidInputError, match="in the middle of a batch"):
        accumulator(model, closure=closure, micro_batch=5).backward(batch())
    assert_bitwise(gradients(model), before)


@pytest.mark.parametrize("kind", ["closure", "loss"])
@pytest.mark.parametrize(("most", "reached_by"), [(None, 1), (None, 2), (4, 2)])
def test_parameters_of_other_modules_are_refused_when_a_later_micro_batch_reaches_them(kind, most, reached_by):
    """The first one or the second of a later batch, also one in which memory has run out."""
    model, hidden = Failing(), {"other": [nn.Linear(CLASSES, CLASSES).double()]}
    calls = None

    def loss(outputs, targets):
        nonlocal calls
        if calls is not None and model.training:
            calls += 1
            if calls >= reached_by:
                outputs = hidden["other"][0](outputs)
        return functional.cross_entropy(outputs, targets)

    function = loss if kind == "loss" else lambda part: loss(model(part[0]), part[1])
    accumulating = accumulator(model, micro_batch=6, loss_reduction="mean", **{kind: function})
    accumulating.backward(batch())
    before, model.most, calls = gradients(model), most, 0

    with pytest.raises(autoaccum.InvalidInputError, match="parameters that are not the model's"):
        accumulating.backward(batch(1))
    assert_bitwise(gradients(model), before)
    assert hidden["other"][0].weight.grad is None


def test_parameters_of_modules_that_a_loss_refers_to_get_their_gradient():
    model, head = Failing(most=5), nn.Linear(CLASSES, CLASSES).double()
    plain, plain_head = Failing(), copy.deepcopy(head)

    accumulator(model, lambda outputs, targets: functional.cross_entropy(head(outputs), targets)).backward(batch())

    functional.cross_entropy(plain_head(plain(batch()[0])), batch()[1]).backward()
    assert_equal_gradients(model, gradients(plain))
    assert_equal_gradients(head, gradients(plain_head))


def test_outputs_of_a_closure_are_those_that_it_returns_beside_its_loss():
    model = Failing(most=5)

    def closure(part):
        outputs = model(part[0])
        return {"loss": functional.cross_entropy(outputs, part[1]), "outputs": (outputs, len(part[1]))}

    report = accumulator(model, closure=closure).backward(batch(), keep="outputs")

    assert len(report.micro_batches) > 1
    assert [size for _, size in report.outputs] == list(report.micro_batches)
    alone = [Failing()(inputs).detach() for inputs in batch()[0].split(report.micro_batches)]
    assert_bitwise([outputs for outputs, _ in report.outputs], alone)
    assert list(report.losses) == ["loss"]


def test_outputs_that_a_closure_does_not_return_cannot_be_kept():
    model = Failing()
    accumulating = accumulator(model, closure=lambda part: functional.cross_entropy(model(part[0]), part[1]))

    with pytest.raises(autoaccum.InvalidInputError, match="keep='outputs': the closure returned none"):
        accumulating.backward(batch(), keep="outputs")
    with pytest.raises(autoaccum.InvalidInputError, match="keep='graphs'"):
        accumulating.backward(batch(), keep="graphs")
    assert gradients(model) == [None] * 6


def test_inference_mode_is_refused():
    model = Failing()
    with torch.inference_mode():
        made_there = batch()
        with pytest.raises(autoaccum.InvalidInputError, match=r"within torch\.inference_mode"):
            accumulator(model).backward(batch())

    with pytest.raises(autoaccum.InvalidInputError, match=r"made within torch\.inference_mode"):
        accumulator(model).backward(made_there)
    assert gradients(model) == [None] * 6


def test_backward_within_backward_is_refused():
    model = Failing()

    def closure(part):
        accumulating.backward(part)

    accumulating = accumulator(model, closure=closure)

    with pytest.raises(autoaccum.InvalidInputError, match="within backward"):
        accumulating.backward(batch())
    assert gradients(model) == [None] * 6


def test_gradients_of_earlier_batches_are_not_lost_where_a_loss_changes_its_form():
    class Grown(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 1), None

        def forward(self, inputs):
            return self.first(inputs) + (0.0 if self.second is None else self.second(inputs))

    def loss(outputs, targets):
        value = (outputs - targets).square().mean()
        return {"one": value, "other": 0.0 * value} if number == 5 else value

    model, batches = Grown(), [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(6)]
    accumulator = autoaccum.Accumulator(model, loss=loss, device="cpu", micro_batch=4, loss_reduction="mean")
    for number, one in enumerate(batches):
        if number == 4:
            model.zero_grad()
            model.second = nn.Linear(3, 1)
        accumulator.backward(one)
    found = [parameter.grad.clone() for parameter in model.parameters()]

    model.zero_grad()
    for inputs, targets in batches[4:]:
        (model(inputs) - targets).square().mean().backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in model.parameters()])


@pytest.mark.parametrize("micro_batch", [4, 8])
def test_a_model_may_change_the_dictionary_that_it_is_given(micro_batch):
    model = nn.Linear(3, 1)
    batch = {"x": torch.randn(8, 3), "y": torch.randn(8, 1)}

    def forward(model, given):
        given["step"] = 1
        return model(given.pop("x"))

    accumulator = autoaccum.Accumulator(
        model, loss=lambda outputs, given: (outputs - given["y"]).square().mean(), forward=forward,
        device="cpu", micro_batch=micro_batch,
    )  # fmt: skip
    for _ in range(3):
        accumulator.backward(batch)

    assert list(batch) == ["x", "y"]


def test_choices_are_told_in_one_line(capfd):
    autoaccum.Accumulator(nn.Linear(2, 2), loss=nn.MSELoss(), micro_batch=2)

    (line,) = capfd.readouterr().err.splitlines()
    assert line == "autoaccum: chosen: device cpu (device=), precision fp32 (precision=)"
