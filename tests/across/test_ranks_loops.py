"""Loops with an accumulator on several ranks, with whole or spread models: the gradient of all their batches."""

import contextlib
import functools
import io
import re
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional

import autoaccum
from autoaccum._distributed import fsdp as fsdp_peers  # of which a check is to be left out
from autoaccum._engine import assembly  # which is to move nothing
from support.models.small import Limited
from support.ranks import expect, loops
from support.ranks.cached import Cached
from support.ranks.lacking import FailAtPoint, lacking_on
from support.ranks.rows import SPREAD, SPREAD_1, SPREAD_3, SPREAD_4, THREE, TWO, Row, slow, sweep, table
from support.ranks.sharded import Greedy, spread, whole
from support.ranks.training import CLASSES, FAR, LENGTH, WIDTH, assert_alike, far, net, texts, vectors

LOOP = {"by": "loops"}


def loop(claim, given=LOOP, on=(SPREAD,), holds=None):
    """A row of a loop, in which arguments may be a function of rank and size."""
    arguments = (lambda rank, size: LOOP | given(rank, size)) if callable(given) else LOOP | given
    return Row(claim, arguments, on, holds or expect.as_alone())


def limited(most, *, norm=False):
    """A model that lacks memory for more samples at once, by rank."""
    return lambda rank, size: {"model": Limited(net(rank, norm=norm), most.get(rank) if size > 1 else None)}


def both(*given):
    """Arguments together, of which some are functions of rank and size."""

    def arguments(rank, size):
        return {k: v for one in given for k, v in (one(rank, size) if callable(one) else one).items()}

    return arguments


# --- the gradient of all batches together -----------------------------------------------------------------------------


def parts_are_unlike(found):
    assert found[0]["samples"] == [loops.BATCH] * 3
    assert len({len(one["cuts"][0]) for one in found}) > 1


def only_rank_1_lacked(found):
    assert [one["oom"] > 0 for one in found] == [False, True]


def divided(rank, size):
    """A sum that is divided by the tokens of all ranks, where one sample fits at once."""
    tokens = []

    def count(number, model):
        tokens.append(sum(int((loops.part(texts, one, size, number)[1] != -100).sum()) for one in range(size)))

    def loss(outputs, targets):
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum") / tokens[-1]

    return limited({0: 1, 1: 1})(rank, size) | {
        "loss": (loss, texts),
        "before": count,
        "steps": 2,
        "micro_batch": "auto",
    }


def freezes(number, model):
    if number == 1:
        model.body[0].requires_grad_(requires_grad=False)


def unfreezing(rank, size):
    model = net(0)
    model[0].requires_grad_(requires_grad=False)

    def before(number, model):
        if number == 2:
            model[0].requires_grad_(requires_grad=True)

    return {"model": model, "before": before, "steps": 4, "optimizer": None}


def growing(loss):
    """A new layer in the second half of a step, and a loss that reports more at last, on one rank."""

    def arguments(rank, size):
        reports = []

        def before(number, model):
            if number == 4:
                torch.manual_seed(1)
                model.append(nn.Linear(CLASSES, 4).double())
            if number == 5 and rank == 1:
                reports.append("more")

        def reporting(outputs, targets):
            return {
                "loss": loops.LOSSES[loss][0](outputs, targets),
                **{name: outputs.detach().sum() for name in reports},
            }

        return {"model": net(0), "loss": (reporting, vectors), "before": before, "steps": 6, "optimizer": None}

    return arguments


def ragged(rank, size, number):
    """This rank's texts of a batch, in lengths of their own."""
    chance = torch.Generator().manual_seed(number)
    lengths = torch.randint(1, 4 * LENGTH, (loops.BATCH,), generator=chance).tolist()
    drawn = [
        (torch.randn(length, WIDTH, generator=chance, dtype=torch.float64), torch.randint(CLASSES, (length,)))
        for length in lengths
    ]
    return drawn[slice(*loops.bounds(size)[rank : rank + 2])]


def padded(samples):
    inputs, targets = zip(*samples, strict=True)
    targets = nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=-100)
    return nn.utils.rnn.pad_sequence(inputs, batch_first=True), targets


RAGGED = {"loss": "tokens", "batch": ragged, "split": autoaccum.ListOfSamples(padded)}
GRADIENTS = [
    *(
        loop(f"parameters are those of one process, {loss}", {"loss": loss},
             (TWO, SPREAD, slow(SPREAD_3), slow(SPREAD_4)), expect.as_alone(also=parts_are_unlike))
        for loss in loops.LOSSES
    ),
    *(
        loop(f"also where one rank lacks memory, {loss}", both(limited({1: 2}), {"loss": loss}), (TWO,),
             expect.as_alone(also=only_rank_1_lacked))
        for loss in loops.LOSSES
    ),
    loop("a sum over the tokens of all ranks is one where one sample fits at once", divided, (TWO,)),
    loop("batches add up, and parameters are frozen, on all ranks",
         both(limited({0: 1, 2: 3}), {"before": freezes, "batches": 2}), (THREE,)),
    loop("a layer that is unfrozen between steps is added up", unfreezing, (TWO,)),
    *(
        loop(f"parameters that come in the middle of a step are added up, {loss}", growing(loss), (TWO,),
             expect.as_alone(reports=False))
        for loss in ("pair", "module")
    ),
    loop("texts in lengths of their own are those of one process", RAGGED, (SPREAD_3,)),
    loop("statistics of BatchNorm are alike", limited({0: 3}, norm=True), (TWO,), expect.alike),
    loop("statistics of BatchNorm of a spread model are alike", lambda *_: {"model": net(norm=True)},
         holds=expect.alike),
]  # fmt: skip


# --- ways of spreading ------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, 8), nn.Linear(8, WIDTH, bias=False)
        self.head.weight = nn.Parameter(torch.randn(WIDTH, 8) / 4)
        self.embed.weight = nn.Parameter(self.head.weight.detach().t().contiguous())
        self.last = nn.Linear(WIDTH, 8)
        self.last.weight = self.embed.weight

    def forward(self, inputs):
        return self.last(self.head(torch.tanh(self.body(self.embed(inputs)))))


def tied(rank, size):
    def spreads(model):
        fsdp.fully_shard(model.body)
        return fsdp.fully_shard(model)

    return {"model": Tied().double(), "spreads": spreads}


def frozen(spreads):
    def arguments(rank, size):
        model = net(0)
        model[0].requires_grad_(requires_grad=False)
        return {"model": model, "spreads": spreads}

    return arguments


def spread_but_the_frozen(model):
    fsdp.fully_shard(model[3])
    return model


def in_halves(model):
    return spread(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))


def left_gathered(model):
    model = spread(model)
    with torch.no_grad():
        model(torch.zeros(3, WIDTH, dtype=torch.float64))
    model.kept_here = list(model.parameters())
    return model


def without_sync(rank, size):
    def before(number, model):
        if size > 1:
            model.set_requires_gradient_sync(bool(number))

    return {"before": before, "steps": 2, "optimizer": None}


IN_HALF = {"spreads": functools.partial(spread, mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=torch.float32))}


def near_in_float32(run):
    found = run.answers()
    if torch.__version__ < "2.9":  # whose gloo takes sums for means of what is not in float64
        assert all("adds up the gradients that fully_shard averages" in str(one) for one in found)
        return
    assert_alike(found)
    assert 1e-9 < far(found[0]["parameters"], run.alone()["parameters"]) < 1e-6


UNCHECKED = mock.patch.object(fsdp_peers, "_check_mean", side_effect=AssertionError("there is no other rank"))
WAYS = [
    loop("layers may stay gathered", {"spreads": functools.partial(spread, reshard_after_forward=False)}),
    loop("frozen layers may be spread", frozen(spread)),
    loop("frozen layers may be whole", frozen(spread_but_the_frozen)),
    loop("weights may be tied", tied),
    loop("each half of the ranks may have a copy", {"spreads": in_halves}, (SPREAD_4,)),
    loop("passes in a lower precision are near one process", IN_HALF, holds=near_in_float32),
    loop("parameters that an evaluation left gathered are spread again", {"spreads": left_gathered}),
    loop("gradients are reduced where the loop has switched that off", without_sync),
    loop("one process of its own group trains as without", on=(SPREAD_1,)),
    loop("and is not asked what others average", lambda *_: IN_HALF | {"steps": 1, "during": UNCHECKED}, (SPREAD_1,),
        expect.alike),
]  # fmt: skip


# --- scaling, memory and errors ---------------------------------------------------------------------------------------


def spoiled(rank, size, number):
    inputs, targets = loops.part(vectors, rank, size, number)
    inputs[0] = float("inf") if rank == 1 else inputs[0]
    return inputs, targets


def scale_is(scale):
    def claim(found):
        assert [one["scale"] for one in found] == [scale] * 2

    return claim


def skipped(found):
    scale_is(32.0)(found)
    assert all(map(torch.equal, found[0]["parameters"], net(0).parameters()))


def begins_anew(*, cut):
    """With smaller parts, or with the same ones."""

    def holds(run):
        found, calm = run(), run(during=contextlib.nullcontext())
        expect.assert_same(found, run.alone())
        assert [one["oom"] for one in found] == [1, 1]
        assert any(one["cuts"] != other["cuts"] for one, other in zip(found, calm, strict=True)) is cut

    return holds


def greedy(backward):
    def arguments(rank, size):
        model = net(0)
        model.insert(2, Greedy(2 if rank == 1 else 1000, backward=backward))
        return {"model": model}

    return arguments


def sizes_are(*expected):
    def claim(answers):
        assert [one.micro_batch for one in answers] == list(expected)

    return claim


def raising_on_rank_1(rank, size):
    def loss(outputs, targets):
        if rank == 1:
            raise LookupError("the user's own")
        return functional.cross_entropy(outputs, targets)

    return {"loss": (loss, vectors)}


def simulated(*capacities):
    def arguments(rank, size):
        device = autoaccum.Simulated(capacities[rank]) if size > 1 else "cpu"
        return {"steps": 8, "micro_batch": "auto", "device": device}

    return arguments


def grows(found):
    plans = found[0]["plans"]
    assert plans[0] == 1
    assert plans == sorted(plans)
    assert plans[-1] == found[1]["plans"][-1] == 8  # the samples of rank 0


def with_state(*, fused):
    adam = functools.partial(torch.optim.Adam, fused=fused)
    options = {"optimizer": adam, "batches": 3, "micro_batch": "auto"}
    return lambda *_: options | {"device": autoaccum.Simulated("1GiB")}


def grows_after_a_step(found):
    for one in found:
        assert one["plans"][:4] == [1] * 4  # what the batch after the step takes shows in the next
        assert one["plans"][-1] == 8


def long_texts(rank, size, number):
    chance = torch.Generator().manual_seed(10 * number + rank)
    inputs = torch.randn(48, 8 * LENGTH, WIDTH, generator=chance, dtype=torch.float64)
    return inputs, torch.randint(CLASSES, inputs.shape[:2], generator=chance)


def with_a_cache(capacity):
    options = {"loss": "tokens", "batch": long_texts, "steps": 8, "micro_batch": "auto", "optimizer": torch.optim.Adam}
    return lambda *_: options | {"device": Cached(capacity)}


def grows_beside(capacity, sizes):
    def claim(found):
        assert [one["plans"] for one in found] == [sizes] * 2
        assert max(one["most"] for one in found) <= 0.85 * capacity

    return claim


class Noting(autoaccum.Simulated):
    """Notes the most that was in use, whoever resets the peak."""

    _most = 0

    @property
    def most(self):
        return max(self._most, self.peak_bytes() or 0)

    def reset_peak(self):
        self._most = self.most
        super().reset_peak()


def largest_is_told(found):
    assert [one["peaks"][-1] for one in found] == [one["most"] for one in found]


TWICE = {"batches": 2, "clip": 0.1}
AGAIN = (autoaccum.StartAgainError, "rank 1 ran out of memory with")
IN_SPARE_PASS = (autoaccum.StartAgainError, "in a pass for the others, which has")
MEMORY_AND_ERRORS = [
    loop("batches add up and are clipped", TWICE, holds=expect.as_alone(rounding=expect.CLIPPED)),
    loop("also where memory runs out", both(TWICE, lacking_on(1, "enter", 5)),
         holds=expect.as_alone(rounding=expect.CLIPPED)),
    loop("scaled steps are those of one process", {"scaler": 64.0, "steps": 4},
         holds=expect.as_alone(also=scale_is(256.0))),
    loop("a step is skipped on all ranks where one has an infinite gradient",
         {"scaler": 64.0, "steps": 1, "batch": spoiled}, holds=lambda run: skipped(run())),
    *(
        loop(f"memory that runs out outside of a pass ({where}) begins the batch anew", lacking_on(1, where, at),
             holds=begins_anew(cut=cut))
        for where, at, cut in [("enter", 3, True), ("transfer", 2, True), ("after the passes", 2, False)]
    ),
    *(
        loop(f"memory that runs out within a pass ends every rank with the word to start again, backward={backward}",
             greedy(backward), holds=expect.ends(AGAIN, (*AGAIN, "autoaccum run"), wait_s=2, also=sizes_are(None, 4)))
        for backward in (False, True)
    ),
    loop("memory that runs out in a pass for the others names the size of this rank's own",
         lacking_on(0, "spare pass", 1), holds=expect.ends((autoaccum.StartAgainError,), IN_SPARE_PASS, wait_s=2,
                                                           also=sizes_are(4, None))),  # of 8 samples in two
    loop("an error on one rank ends the others at once", raising_on_rank_1, (TWO,),
         expect.ends((autoaccum.RankFailedError, "the user's own"), (LookupError,))),
    loop("an error before a pass on one rank ends the others", raising_on_rank_1,
         holds=expect.ends((autoaccum.RankFailedError,), (LookupError,), wait_s=2)),
    loop("a sample that does not fit on one rank ends all", limited({0: 0}), (TWO,),
         expect.ends((autoaccum.DoesNotFitError,), (autoaccum.RankFailedError,))),
    loop("sizes grow from the smallest by what smaller ones show", simulated("1GiB", "1GiB"),
         holds=expect.as_alone(also=grows)),
    loop("a rank with less memory holds the sizes of all", simulated("1GiB", "4KiB"),
         holds=expect.outcomes(plans=[1] * 8)),
    *(
        loop(f"sizes grow once the optimizer has its state, fused={fused}", with_state(fused=fused),
             holds=expect.outcomes(grows_after_a_step))
        for fused in (False, True)  # a fused kernel moves no versions
    ),
    *(
        loop(f"sizes grow in {capacity} bytes by what tensors take and not by what an allocator has cached",
             with_a_cache(capacity), (place,), expect.outcomes(grows_beside(capacity, sizes)))
        for place, capacity, sizes in [
            (sweep(SPREAD), 200_000, [1, 1, 2, 4, 8, 16, 16, 16]), (SPREAD, 60_000, [1, 1, 2, 4, 6, 6, 6, 6]),
        ]
    ),
    loop("a report tells of the largest pass and not of the last", lambda *_: RAGGED | {"device": Noting("1GiB")},
         holds=expect.outcomes(largest_is_told)),
]  # fmt: skip


# --- what is refused --------------------------------------------------------------------------------------------------


def late(at):
    """A model that is spread after its accumulator was made."""

    def before(number, model):
        if number == at:
            spread(model)

    return {"before": before, "micro_batch": 3}


def in_columns(model, mesh):
    for at in (0, 3):
        parallelize_module(model[at], mesh, ColwiseParallel())
    return model


def in_columns_and_spread(model):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return spread(in_columns(model, mesh["tp"]), mesh=mesh["dp"])


def over_some(model):
    return spread(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("all", "some"))["some"])


def by_layers(*order):
    def spreads(model):
        fsdp.fully_shard([model[at] for at in order])
        return fsdp.fully_shard(model)

    return spreads


def first_layer(model):
    fsdp.fully_shard(model[0])
    return model


def one_of_two_blocks(at):
    def spreads(model):
        model.insert(1, nn.Linear(8, 8).double()).insert(1, nn.Linear(8, 8).double())
        fsdp.fully_shard(model[at])
        return fsdp.fully_shard(model)

    return spreads


def undivided(model):
    spread(model)[0].set_gradient_divide_factor(1.0)
    return model


def placed(rank):
    return lambda model: spread(model, shard_placement_fn=lambda one: Shard(rank if one.dim() > 1 else 0))


def by_rank(*spreads):
    return lambda rank, _: {"spreads": spreads[rank]}


OFFLOADED = functools.partial(spread, offload_policy=fsdp.CPUOffloadPolicy(pin_memory=False))
UNMOVED = mock.patch.object(assembly, "_move", side_effect=AssertionError("moved"))
FOUR_RANKS = (SPREAD_4,)
REFUSED = [
    loop(f"refused on all ranks before anything is touched: {what}", given, on, expect.refused(said))
    for what, given, on, said in [
        ("late", late(0), (TWO,), "fully_shard was called after this Accumulator was made"),
        ("between two batches", late(2), (TWO,), "fully_shard was called after this Accumulator was made"),
        ("partly", {"spreads": first_layer}, (SPREAD,), "parameter '3.weight' is trained and on every rank whole"),
        ("offload", lambda *_: {"spreads": OFFLOADED, "during": UNMOVED}, (SPREAD,), "CPUOffloadPolicy"),
        ("unlike layers", by_rank(spread, fsdp.fully_shard), (SPREAD,), "another model than rank 0"),
        (
            "unlike policies",
            by_rank(*(functools.partial(spread, reshard_after_forward=one) for one in (False, True))),
            (SPREAD,),
            "reshard_after_forward",
        ),
        ("one rank", by_rank(spread, lambda model: model), (SPREAD,), "another model than rank 0"),
        (
            "tensor parallel",
            {"spreads": lambda model: in_columns(model, init_device_mesh("cpu", (2,)))},
            (SPREAD,),
            "find_executable_micro_batch",
        ),
        ("tensor parallel too", {"spreads": in_columns_and_spread}, FOUR_RANKS, "find_executable_micro_batch"),
        ("some ranks", {"spreads": over_some}, FOUR_RANKS, "is spread over 2 ranks, and this training has 4"),
        ("divided", {"spreads": undivided}, (SPREAD,), "set_gradient_divide_factor"),
        ("unlike dimensions", by_rank(placed(0), placed(1)), (SPREAD,), "Shard(dim=1)"),
        ("unlike order", by_rank(by_layers(0, 3), by_layers(3, 0)), (SPREAD,), "of 3.weight, 3.bias, 0.weight, 0.bias"),
        ("unlike blocks", by_rank(*map(one_of_two_blocks, (1, 2))), (SPREAD,), "another model than rank 0"),
        ("savings", {"save_memory": "checkpoint"}, (SPREAD,), "save_memory='checkpoint' is not for a model"),
        ("whole windows", {"loss_scope": "window"}, (SPREAD,), "loss_scope='window'"),
    ]
]

ROWS = table(__file__, *GRADIENTS, *WAYS, *MEMORY_AND_ERRORS, *REFUSED)


@pytest.mark.parametrize("row", ROWS)
def test_ranks(rank_pool, row, tmp_path):
    row.check(rank_pool, tmp_path)


# --- more than one training -------------------------------------------------------------------------------------------

HERE = "across.test_ranks_loops"
OPTIONS = {"loss": nn.CrossEntropyLoss(), "device": "cpu", "precision": "fp32", "micro_batch": 5}


def wrapped(rank, size, is_compiled):
    """Return what is said of a closure that calls a model in DistributedDataParallel, and of one compiled around it."""
    model = torch.nn.parallel.DistributedDataParallel(net(rank))
    if is_compiled:
        model = torch.compile(model, backend="eager")
    loader = [(torch.zeros(2, WIDTH, dtype=torch.float64), torch.zeros(2, dtype=torch.long))]
    said = []
    try:
        autoaccum.Accumulator(
            model, closure=lambda part: functional.cross_entropy(model(part[0]), part[1]), device="cpu"
        )
    except autoaccum.InvalidInputError as error:
        said.append(str(error))
    try:
        autoaccum.fit(model, loader, 2, loss=functional.cross_entropy, device="cpu", progress=False)
    except autoaccum.InvalidInputError as error:
        said.append(str(error))
    return said


@pytest.mark.parametrize("is_compiled", [False, True])
def test_models_that_reduce_gradients_in_every_pass_are_refused(rank_pool, is_compiled):
    for said in rank_pool.run(f"{HERE}:wrapped", size=2, is_compiled=is_compiled):
        assert len(said) == 1 + is_compiled  # `fit` trains the module inside of one that is only wrapped
        assert all(re.search(r"DistributedDataParallel.* model\.compile\(\)", one) for one in said)


class Raising(nn.Module):
    """Raises an error of the user's own when it is told to."""

    error = None

    def forward(self, inputs):
        if self.error is not None:
            raise self.error
        return inputs


def own_error(rank, size, error):
    """Raise an error of the user's own within a pass of rank 1, which goes on all the same; return what was raised."""
    model, raising, said = net(0), Raising(), []
    model.insert(2, raising)
    accumulator = autoaccum.Accumulator(spread(model), **OPTIONS)
    for number in range(3):
        try:
            accumulator.backward(loops.part(vectors, rank, size, number))
        except Exception as raised:  # noqa: BLE001 - it is the answer
            said.append(raised.with_traceback(None))
            if rank == 0:
                break
        raising.error = error if rank else None
    return said


@pytest.mark.parametrize("error", [RuntimeError("no skip connection: timeout"), ValueError("gloo")], ids=str)
def test_own_error_within_a_pass_keeps_its_type_and_no_batch_follows_it(rank_pool, error):
    (of_other,), (own, *later) = rank_pool.answers(f"{HERE}:own_error", error, size=2, wait_s=2)

    assert type(own) is type(error)
    assert str(own) == str(error)
    assert isinstance(of_other, autoaccum.RankFailedError), of_other
    assert [type(one) for one in later] == [autoaccum.RankFailedError]
    assert "has left a pass of the model by an error" in str(later[0])


def faulted(rank, size, points):
    """Return gradients of a batch in which an operator of a rank runs out of memory, and how many there are.

    `points` is by rank: the number of the operator.
    """
    model = spread(net(0))
    accumulator = autoaccum.Accumulator(model, **OPTIONS)
    accumulator.backward(loops.part(vectors, rank, size, 0))  # also what checks begin with
    mode = FailAtPoint(*([points[rank]] if rank in points else ()))
    mode.begin()
    model.zero_grad()
    batch = loops.part(vectors, rank, size, 1)
    with mode, contextlib.redirect_stderr(io.StringIO()):
        accumulator.backward(batch)
    return {"gradients": [whole(one.grad) for one in model.parameters()], "operators": mode.count, "hits": mode.hits}


@pytest.mark.parametrize("most", [3, pytest.param(60, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.slow  # a rank waits for seconds for one that has left a pass
def test_operator_that_lacks_memory_anywhere_ends_all_ranks_or_changes_nothing_but_cuts(rank_pool, who, most):
    calm = rank_pool.run(f"{HERE}:faulted", {}, size=2)
    operators = calm[who]["operators"]
    ends = set()

    for point in range(1, operators, -(-operators // most)):
        found = rank_pool.answers(f"{HERE}:faulted", {who: point}, size=2, wait_s=2)

        kinds = [type(one) for one in found]
        ends.add(kinds[0])
        if dict in kinds:
            assert [one["hits"] for one in found] == [int(rank == who) for rank in range(2)]
            assert all(map(torch.equal, found[0]["gradients"], found[1]["gradients"]))
            assert far(found[0]["gradients"], calm[0]["gradients"]) <= FAR
        else:
            assert kinds == [autoaccum.StartAgainError] * 2, (point, found)
    assert autoaccum.StartAgainError in ends  # most operators are within passes
