"""Loops with an accumulator of a model that `fully_shard` has spread over ranks, and of the same model alone."""

import contextlib
import io
import itertools
from dataclasses import replace
from unittest import mock

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import autoaccum
from autoaccum._distributed import fsdp as fsdp_peers  # of which a check is to be left out
from autoaccum._distributed.pass_memory import PassMemory  # whose answer on another rank is asked for
from autoaccum._engine import assembly  # which is to move nothing
from support.ranks import accumulating, sharded_lacking
from support.ranks.faults import FailAtPoint
from support.ranks.sharded import Greedy, sharded
from support.ranks.training import CLASSES, LENGTH, WIDTH, net


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


def whole(parameter):
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()


def here(parameter):
    """What this rank has of a parameter."""
    return (parameter.to_local() if hasattr(parameter, "to_local") else parameter).detach()


def spread(model, **policy):
    """Spread a model over all ranks: its linear layers each, then the rest."""
    for layer in model:
        if isinstance(layer, nn.Linear):
            fsdp.fully_shard(layer, **policy)
    return fsdp.fully_shard(model, **policy)


def made(size, how):  # noqa: PLR0911 - a case each
    """Return a model as `how` says; whole where there is one process."""
    model = Tied().double() if how == "tied" else net(0, norm=how == "norm")
    if how == "frozen":
        model[0].requires_grad_(requires_grad=False)
    if size == 1 and not how.startswith("spread"):
        return model
    match how:
        case "tied":
            fsdp.fully_shard(model.body)
            return fsdp.fully_shard(model)
        case "hybrid":
            mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copies", "shards"))
            return spread(model, mesh=mesh)
        case "kept":
            return spread(model, reshard_after_forward=False)
        case "half" | "spread in half":
            return spread(model, mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=torch.float32))
        case "frozen whole":
            model[0].requires_grad_(requires_grad=False)
            fsdp.fully_shard(model[3])
            return model
    return spread(model)


def ragged(rank, size, number):
    """Return this rank's texts of a batch, in lengths of their own."""
    chance = torch.Generator().manual_seed(number)
    lengths = torch.randint(1, 4 * LENGTH, (24,), generator=chance).tolist()
    texts = [
        (torch.randn(length, WIDTH, generator=chance, dtype=torch.float64), torch.randint(CLASSES, (length,)))
        for length in lengths
    ]
    bound = [round(24 * (at / size) ** 1.5) for at in range(size + 1)]
    return texts[bound[rank] : bound[rank + 1]]


def padded(texts):
    inputs, targets = zip(*texts, strict=True)
    targets = nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=-100)
    return nn.utils.rnn.pad_sequence(inputs, batch_first=True), targets


def train(  # noqa: C901 - each part of a loop
    rank,
    size,
    *,
    loss="module",
    how="",
    steps=3,
    twice=False,
    clip=None,
    scaler=None,
    spoils=None,
    is_ragged=False,
    greedy=None,
    backward=False,
    fails=(),
    lacks=None,
    micro_batch=5,
    **options,
):
    """Train with SGD and an accumulator; return what it has come to.

    `greedy` is the rank that lacks memory within a pass, `lacks` the rank, the place and the call at which memory runs
    out before one, `spoils` the step and rank with an infinite input, `fails` the ranks whose loss raises.
    """
    torch.manual_seed(0)
    function, samples = accumulating.LOSSES[loss]
    model = made(1 if greedy is not None else size, how)
    if greedy is not None:
        model.insert(2, Greedy(2 if rank == greedy else 1000, backward=backward))
        model = spread(model)

    def failing(outputs, targets):
        if rank in fails:
            raise LookupError("the user's own")
        return function(outputs, targets)

    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1, momentum=0.9)
    scaling = None if scaler is None else torch.amp.GradScaler("cpu", init_scale=scaler, growth_interval=2)
    given = {"loss": failing if fails else function, "scale": scaling, "device": "cpu", "precision": "fp32"}
    given |= {"micro_batch": micro_batch} | options
    if is_ragged:
        given["split"] = autoaccum.ListOfSamples(padded)
    found = {"losses": [], "oom_events": 0, "samples": [], "cuts": [], "norms": [], "plans": []}
    with contextlib.redirect_stderr(io.StringIO()), _lacking(rank, lacks):
        accumulator = autoaccum.Accumulator(model, **given)
        for number in range(steps):
            for at in range(2 if twice else 1):
                batch = (ragged if is_ragged else _part(samples))(rank, size, (number + at) % 4)
                if spoils == (number, rank):
                    batch[0][0] = float("inf")
                report = accumulator.backward(batch)
            found["losses"].append(report.loss)
            found["samples"].append(report.samples)
            found["cuts"].append(report.micro_batches)
            found["oom_events"] += report.oom_events
            found["plans"].append(accumulator.plan.micro_batch)
            if scaling is not None:
                scaling.unscale_(optimizer)
            if clip is not None:
                found["norms"].append(whole(nn.utils.clip_grad_norm_(model.parameters(), clip)).item())
            if scaling is None:
                optimizer.step()
            else:
                scaling.step(optimizer)
                scaling.update()
            optimizer.zero_grad()
    found["parameters"] = [whole(parameter).clone() for parameter in model.parameters()]
    found["buffers"] = [buffer.clone() for buffer in model.buffers()]
    found["scale"] = None if scaling is None else scaling.get_scale()
    return found


def _part(samples):
    return lambda rank, size, number: accumulating.part(samples, rank, size, number)


def _lacking(rank, lacks):
    """Let memory run out in a part of the library, once."""
    if lacks is None or lacks[0] != rank:
        return contextlib.nullcontext()
    _, (owner, name), fails_at = lacks[0], sharded_lacking.WHERE[lacks[1]], lacks[2]
    real, calls = getattr(owner, name), itertools.count(1)

    def failing(*given, **named):
        if next(calls) == fails_at:
            where = lacks[1] == "transfer"
            return contextlib.nullcontext(sharded_lacking.raising()) if where else next(sharded_lacking.raising())
        return real(*given, **named)

    return mock.patch.object(owner, name, failing)


def faulted(rank, size, points):
    """Return gradients of a batch in which an operator of a rank runs out of memory, and how many there are.

    `points` is by rank: the number of the operator.
    """
    model = made(size, "")
    accumulator = autoaccum.Accumulator(
        model, loss=nn.CrossEntropyLoss(), device="cpu", precision="fp32", micro_batch=5
    )
    accumulator.backward(_part(accumulating.vectors)(rank, size, 0))  # also what checks begin with
    mode = FailAtPoint(*([points[rank]] if rank in points else ()))
    mode.begin()
    model.zero_grad()
    batch = _part(accumulating.vectors)(rank, size, 1)
    with mode, contextlib.redirect_stderr(io.StringIO()):
        accumulator.backward(batch)
    return {"gradients": [whole(one.grad) for one in model.parameters()], "operators": mode.count, "hits": mode.hits}


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(rank, size, how):  # noqa: C901, PLR0912, PLR0915 - a case each
    """Return what an accumulator, or its first batch, raises."""
    model = net(0)
    batch = accumulating.part(accumulating.vectors, rank, size, 0)
    options, late = {}, False
    match how:
        case "late":
            late = True
        case "partly":
            fsdp.fully_shard(model[0])
        case "offload":
            spread(model, offload_policy=fsdp.CPUOffloadPolicy(pin_memory=False))
        case "unlike layers":
            fsdp.fully_shard(model) if rank else spread(model)
        case "unlike policies":
            spread(model, reshard_after_forward=bool(rank))
        case "one rank":
            model = net(0) if rank else spread(model)
        case "tensor parallel":
            from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module  # noqa: PLC0415

            mesh = init_device_mesh("cpu", (size,))
            for at in (0, 3):
                parallelize_module(model[at], mesh, ColwiseParallel())
        case "tensor parallel too":
            from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module  # noqa: PLC0415

            mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
            for at in (0, 3):
                parallelize_module(model[at], mesh["tp"], ColwiseParallel())
            spread(model, mesh=mesh["dp"])
        case "some ranks":
            spread(model, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("all", "some"))["some"])
        case "unlike dimensions":
            spread(model, shard_placement_fn=lambda one: Shard(rank if one.dim() > 1 else 0))
        case "unlike order":
            layers = [model[0], model[3]]
            fsdp.fully_shard(layers[::-1] if rank else layers)
            fsdp.fully_shard(model)
        case "unlike blocks":
            model = nn.Sequential(net(0)[0], nn.Linear(8, 8).double(), nn.Linear(8, 8).double(), net(0)[3])
            fsdp.fully_shard(model[1 + rank])
            fsdp.fully_shard(model)
        case "divided":
            spread(model)[0].set_gradient_divide_factor(1.0)
        case _:
            spread(model)
            options = how
    before = [here(one).clone() for one in model.parameters()]
    moving = mock.patch.object(assembly, "_move", side_effect=AssertionError("moved"))
    try:
        with moving if how == "offload" else contextlib.nullcontext():
            accumulator = autoaccum.Accumulator(
                model, loss=nn.CrossEntropyLoss(), device="cpu", precision="fp32", micro_batch=3, **options
            )
        if late:
            spread(model)
            before = [here(one).clone() for one in model.parameters()]
        accumulator.backward(batch)
    except autoaccum.InvalidInputError as error:
        is_same = all(map(torch.equal, before, map(here, model.parameters())))
        assert is_same
        assert all(one.grad is None for one in model.parameters())
        return str(error)
    return ""


def late_in_the_middle(rank, size):
    """Return what an accumulator says of a model that is sharded between two batches that are not looked at."""
    model = net(0)
    accumulator = autoaccum.Accumulator(
        model, loss=nn.CrossEntropyLoss(), device="cpu", precision="fp32", micro_batch=3
    )
    for number in range(2):
        accumulator.backward(accumulating.part(accumulating.vectors, rank, size, number))
    sharded(model)
    try:
        accumulator.backward(accumulating.part(accumulating.vectors, rank, size, 2))
    except autoaccum.InvalidInputError as error:
        return str(error)
    return ""


def after_an_evaluation(rank, size):
    """Return gradients where a forward pass before the accumulator was made has left parameters gathered."""
    model = made(size, "")
    batch = accumulating.part(accumulating.vectors, rank, size, 0)
    with torch.no_grad():
        model(batch[0])
    kept = list(model.parameters())
    accumulator = autoaccum.Accumulator(
        model, loss=nn.CrossEntropyLoss(), device="cpu", precision="fp32", micro_batch=5
    )
    accumulator.backward(batch)
    return [whole(one.grad) for one in model.parameters()], len(kept)


def without_sync(rank, size):
    """Return gradients of two batches, of which the loop has switched off the reduction of the first."""
    model = made(size, "")
    accumulator = autoaccum.Accumulator(
        model, loss=nn.CrossEntropyLoss(), device="cpu", precision="fp32", micro_batch=5
    )
    for number in range(2):
        if size > 1:
            model.set_requires_gradient_sync(bool(number))
        accumulator.backward(accumulating.part(accumulating.vectors, rank, size, number))
    return [whole(one.grad) for one in model.parameters()]


def growing(rank, size, capacity):
    """Train on simulated devices, of which each rank has another one."""
    memory = autoaccum.Simulated(capacity[rank])
    return train(rank, size, loss="module", steps=8, micro_batch="auto", device=memory)


class Cached(autoaccum.Simulated):
    """A device whose allocator keeps what is freed, as that of a GPU does: its limit and its peaks count that too."""

    def __init__(self, capacity):
        super().__init__(capacity)
        self._held_bytes = 0

    def _held(self):
        ledger = self._ledger
        self._held_bytes = max(self._held_bytes, ledger.peak_bytes if ledger else 0)
        return self._held_bytes

    def reading(self):
        found = super().reading()
        return replace(found, used_bytes=self._held(), free_bytes=found.used_bytes + found.free_bytes - self._held())

    def reset_peak(self):
        self._held()
        super().reset_peak()

    def peak_bytes(self):
        return self._held() if self._ledger else None

    def peak_in_use_bytes(self):
        return super().peak_bytes()

    def trim(self):
        self._held_bytes = self._ledger.live_bytes if self._ledger else 0

    def release(self):
        super().release()
        self.trim()


def growing_with_a_cache(rank, size, capacity, *, batches=8, samples=48):
    """Train texts where memory that was freed stays with the allocator; return sizes, and the most it has held."""
    memory, model = Cached(capacity), spread(net(0))
    optimizer = torch.optim.Adam(model.parameters())
    found = {"sizes": [], "said": []}
    with contextlib.redirect_stderr(io.StringIO()):
        accumulator = autoaccum.Accumulator(
            model, loss=accumulating.LOSSES["tokens"][0], device=memory, precision="fp32", micro_batch="auto"
        )
        chance = torch.Generator().manual_seed(rank)
        for _ in range(batches):
            inputs = torch.randn(samples, 8 * LENGTH, WIDTH, generator=chance, dtype=torch.float64)
            report = accumulator.backward((inputs, torch.randint(CLASSES, inputs.shape[:2], generator=chance)))
            found["sizes"].append(accumulator.plan.micro_batch)
            found["said"].append(report.peak_bytes)
            optimizer.step()
            optimizer.zero_grad()
    return found | {"held": memory._held()}


class Noting(autoaccum.Simulated):
    """Notes the most that was in use, whoever resets the peak."""

    most = 0

    def reset_peak(self):
        self.most = max(self.most, self.peak_bytes() or 0)
        super().reset_peak()


def reported_peak(rank, size):
    """Return the peaks that reports on texts of unlike length tell of, and the most that was in use."""
    memory = Noting("1GiB")
    model = made(size, "")
    given = {"split": autoaccum.ListOfSamples(padded), "precision": "fp32", "micro_batch": 3, "device": memory}
    accumulator = autoaccum.Accumulator(model, loss=accumulating.LOSSES["tokens"][0], **given)
    peaks = [accumulator.backward(ragged(rank, size, number)).peak_bytes for number in range(3)]
    memory.reset_peak()
    return peaks[-1], memory.most


def before_the_first_step(rank, size):
    """Return the sizes in batches that add up to three steps: of Adam, also by a kernel that moves no versions."""
    found = []
    for options in ({}, {"fused": True}):
        model = made(size, "")
        optimizer = torch.optim.Adam(model.parameters(), **options)
        given = {"device": autoaccum.Simulated("1GiB"), "precision": "fp32", "micro_batch": "auto"}
        with contextlib.redirect_stderr(io.StringIO()):
            accumulator = autoaccum.Accumulator(model, loss=nn.CrossEntropyLoss(), **given)
            sizes = []
            for number in range(9):
                accumulator.backward(_part(accumulating.vectors)(rank, size, number % 4))
                sizes.append(accumulator.plan.micro_batch)
                if number % 3 == 2:
                    optimizer.step()
                    optimizer.zero_grad()
        found.append(sizes)
    return found


class Raising(nn.Module):
    """Raises an error of the user's own when it is told to."""

    error = None

    def forward(self, inputs):
        if self.error is not None:
            raise self.error
        return inputs


def own_error(rank, size, error):
    """Raise an error of the user's own within a pass of rank 1, which goes on all the same; return what was raised."""
    model, raising = net(0), Raising()
    model.insert(2, raising)
    accumulator = autoaccum.Accumulator(
        spread(model), loss=nn.CrossEntropyLoss(), device="cpu", precision="fp32", micro_batch=5
    )
    said = []
    for number in range(3):
        try:
            accumulator.backward(_part(accumulating.vectors)(rank, size, number))
        except Exception as raised:  # noqa: BLE001 - it is the answer
            said.append(raised.with_traceback(None))
            if rank == 0:
                break
        raising.error = error if rank else None
    return said


def alone_in_a_group(rank, size):
    """Train a model that is spread over the one process of a group."""
    with mock.patch.object(fsdp_peers, "_check_mean", side_effect=AssertionError("there is no other rank")):
        train(rank, size, how="spread in half", steps=1)
    return train(rank, size, how="spread")


def kept_back(rank, size):
    """Return the bytes that a first pass asks for: of the largest layer in double precision."""
    memory, found = autoaccum.Simulated("1GiB"), []
    passes = PassMemory(memory, [spread(net(0))])
    memory.ensure = found.append
    passes.enter(1, has_gradients=False, is_least=False)
    return found[0]
