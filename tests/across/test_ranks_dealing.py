"""A window's samples go to the ranks that have least to do; the window and its gradient stay the same."""

import contextlib
import functools
import io
import math
import os
import resource
import signal
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

import autoaccum
from autoaccum._data.batches import Window  # which is dealt out by hand
from autoaccum._distributed.dealing import Dealer  # by hand
from autoaccum._distributed.process_group import Ranks, all_ranks  # whose exchanges are counted
from autoaccum._memory.host import Host  # of the ranks that deal by hand
from autoaccum._sizing.costs import Costs  # that are given
from autoaccum._system.notices import Notices  # of the ranks that deal by hand
from support.data.ragged import Causal, lengths_of, padded, texts
from support.ranks import expect
from support.ranks.rows import FOUR, Place, Row, a_few_rows, table


class Collator:
    """Pads, and notes the lengths of each micro-batch."""

    def __init__(self):
        self.seen, self.alive = [], []

    def __call__(self, samples):
        self.alive.append(len(Counted.alive))
        self.seen.append([len(sample["input_ids"]) for sample in samples])
        return padded([sample["input_ids"] for sample in samples])


class Counted(dict):
    """A sample that counts those that live, and how often samples were pickled."""

    alive, pickled = weakref.WeakSet(), []

    def __init__(self, **fields):
        super().__init__(fields)
        self.alive.add(self)

    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other

    def __copy__(self):
        return dict(self)

    def __reduce__(self):
        self.pickled.append(self["number"])
        return functools.partial(type(self), **self), ()


class Unsendable(Counted):
    """Cannot be pickled."""

    def __reduce__(self):
        super().__reduce__()
        raise TypeError("it holds an open file")


class Unreadable(Counted):
    """Can be pickled, and read by nobody."""

    def __reduce__(self):
        super().__reduce__()
        return _read, ()


def _read():
    raise TypeError("it was in an open file")


class Made(torch.utils.data.Dataset):
    """Makes each sample when it is asked for, and keeps none."""

    def __init__(self, samples, kind):
        self.samples, self.kind = samples, kind

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, place):
        return self.kind(**self.samples[place])


class Costed(autoaccum.ListOfSamples):
    """Says a cost of its own."""

    def __init__(self, collate, cost):
        super().__init__(collate)
        self.said = cost

    def cost(self, batch):
        return self.said


def samples_of(lengths, kind=dict):
    return Made([{"input_ids": text, "number": number} for number, text in enumerate(texts(*lengths))], kind)


def loader_of(samples, shuffle):
    return DataLoader(samples, 6, shuffle=shuffle, collate_fn=list)


def dealt(lengths=None, *, shuffle=False, kind=dict, cost=None, evaluates=False, model=Causal, **given):
    """Train on texts; tell what this rank has computed."""

    def arguments(rank, size):
        collator = Collator()
        samples = samples_of(lengths_of(96) if lengths is None else lengths, kind)
        Counted.pickled.clear()
        told = {"seen": collator.seen, "alive": collator.alive, "pickled": Counted.pickled}
        options = {"model": model(), "seed": 3 - rank, "precision": "fp32", "told": told, "target_batch": 24}
        options["split"] = autoaccum.ListOfSamples(collator) if cost is None else Costed(collator, cost)
        options |= {"make_loader": lambda *_: loader_of(samples, shuffle), "micro_batch": 5}
        if evaluates:
            options["val_loader"] = loader_of(samples_of(lengths_of(30, seed=4)), shuffle=False)
        return options | given

    return arguments


# One of the first rank's samples is as long as all others together.
LONG = [200] + [4, 5, 6, 7] * 8

# --- what each rank computes ------------------------------------------------------------------------------------------


def load_of(found):
    """The tokens of a rank in the last window."""
    return sum(sum(lengths) for lengths in found["told"]["seen"][-len(found["cuts"][-1]) :])


def ranks_finish_together(found, least=24, most=1.03):
    loads = list(map(load_of, found))
    assert max(loads) <= most * max(sum(loads) / len(loads), least)


def of_size(size, micro_batch):
    also = ranks_finish_together if micro_batch == 5 else None  # else costs are those that the clock has measured
    claim = f"{size} ranks train as one, micro_batch={micro_batch}, and finish together"
    return Row(claim, dealt(shuffle=True, micro_batch=micro_batch), (Place(size),), expect.as_alone(also=also))


def long_one_is_alone(found):
    first, second = found
    assert first["cuts"] == [(1,)]
    assert sum(second["cuts"][0]) == 23
    assert first["told"]["seen"][-1] == [200]


def all_tokens(found):
    assert sum(found[0]["samples"]) == 96
    ranks_finish_together(found, most=1.1)


def none_of_others_is_held(found):
    assert found[0]["told"]["pickled"]
    for one in found:
        own, of_loader = sum(one["cuts"][-1]), 6  # the loader's last batch
        assert max(one["told"]["alive"][-len(one["cuts"][-1]) :]) <= max(own, 1 + of_loader)


class Normed(Causal):
    """Refuses a micro-batch of one sample, as BatchNorm does."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8).double()

    def forward(self, input_ids, attention_mask, labels):
        self.norm(self.tokens(input_ids).mean(1))
        return super().forward(input_ids, attention_mask, labels)


COMPUTED = [
    *a_few_rows(of_size, [2, 4], ["auto", 5]),
    Row("a rank with one sample as long as all others has no other", dealt(LONG[:24], loss_reduction="mean"),
        holds=expect.outcomes(long_one_is_alone)),
    Row("a run that goes on within an epoch ends where the undisturbed one ends",
        dealt(shuffle=True, model=functools.partial(Causal, dropout=0.2)),
        holds=expect.goes_on({"max_steps": 2}, {"max_steps": 4}, kept=2)),
    Row("windows of tokens are dealt out too", dealt(target_batch=None, target_tokens=150),
        holds=expect.outcomes(all_tokens)),
    *(Row(f"a last window, of {each} samples, is used once", dealt(lengths_of(each)), (FOUR,)) for each in (49, 60)),
    *(
        Row(f"a last window, of {each} samples, is left out", dealt(lengths_of(each), drop_last=True),
            holds=expect.outcomes(samples=[24, 24]))
        for each in (49, 60)
    ),
    Row("an evaluation between windows is that of one process", dealt(evaluates=True, val_every=2)),
    Row("samples of width 0 are dealt out like any", dealt(cost=0)),
    Row("a model with BatchNorm computes samples as loaded, since it refuses a single one",
        dealt(LONG[:24], model=Normed, micro_batch=4), holds=expect.outcomes(cuts=[(4, 4, 4)])),
    Row("no sample that another rank computes is held in a step",
        dealt(LONG[:24] * 2, kind=Counted, loss_reduction="mean"), holds=expect.outcomes(none_of_others_is_held)),
]  # fmt: skip


# --- what stays, and what ends all ------------------------------------------------------------------------------------


def in_little_memory(lengths=None, **given):
    """On a device that cannot hold a window at once; alone there is room."""

    def arguments(rank, size):
        device = autoaccum.Simulated(60_000) if size > 1 else "cpu"
        return dealt(lengths, micro_batch="auto", device=device, **given)(rank, size)

    return arguments


def cuts(found):
    assert sum(one["oom"] for one in found) or max(map(len, found[0]["cuts"])) > 1


def names_the_sample(run):
    answers = run.answers()
    kinds = [type(answer) for answer in answers]
    assert sorted(kind.__name__ for kind in kinds) == ["DoesNotFitError", "RankFailedError"], answers
    assert "sample 15 of the window" in str(answers[kinds.index(autoaccum.DoesNotFitError)])


def stay(pickled):
    def claim(found):
        for one in found:
            assert [sum(cut) for cut in one["cuts"]] == [12] * 4
            assert len(one["told"]["pickled"]) <= pickled  # those of one window at most
        assert any(one["told"]["pickled"] for one in found)
        said = "samples stay on the ranks that load them, since they cannot be sent to others (TypeError"
        assert found[0]["said"].count(said) == 1

    return claim


def swapping(function, *given, **named):
    """Arguments of `dealt`; the function is called with the rank and the bytes of all swaps so far, before each."""

    def arguments(rank, size):
        calls, real = [], Ranks.swap

        def swap(self, stream, sent, received, expected):
            calls.append(sum(sent) + sum(expected))
            function(rank, calls)
            return real(self, stream, sent, received, expected)

        return dealt(*given, **named)(rank, size) | {"during": mock.patch.object(Ranks, "swap", swap), "told": calls}

    return arguments


def killing(who):
    def kill(rank, calls):
        if rank == who and len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    return kill


def is_gone(who):
    others = (autoaccum.RankFailedError,)
    return expect.ends(*((RuntimeError, "is gone") if rank == who else others for rank in range(2)), wait_s=10)


def swaps(times):
    def claim(found):
        assert [len(one["told"]) for one in found] == [times] * 2

    return expect.outcomes(claim)


def nothing(rank, calls):
    pass


STAY_OR_END = [
    Row("a rank that lacks memory repeats its part, and parameters stay those of one process", in_little_memory(),
        holds=expect.as_alone(also=cuts)),
    Row("a sample wider than any memory is named by its place in the window, and ends all",
        in_little_memory([4, 5, 6, 7] * 3 + [4, 5, 6, 4000] + [4, 5, 6, 7] * 4, loss_reduction="mean"),  # no trials
        holds=names_the_sample),
    *(
        Row(f"a cost of {cost!r} ends all ranks with its value", dealt(cost=cost),
            holds=expect.refused(f"split=Costed: cost returned {cost!r}; return a number from 0"))
        for cost in (-1.0, math.nan, math.inf, "long")
    ),
    *(
        Row(f"samples that cannot be sent stay, {kind.__name__}, which is said once and not tried again",
            dealt(LONG[:24] * 4, kind=kind, progress="lines"), holds=expect.as_alone(also=stay(pickled)))
        for kind, pickled in [(Unsendable, 1), (Unreadable, 12)]
    ),
    Row("samples stay in windows in which noise is measured", swapping(nothing, LONG[:24] * 4, noise_scale=2),
        holds=swaps(2)),  # of four windows
    Row("samples of equal cost are not sent", swapping(nothing, [9] * 48), holds=swaps(0)),
    *(
        Row(f"rank {who} that dies as samples are sent ends all", swapping(killing(who)), holds=is_gone(who))
        for who in (0, 1)
    ),
]  # fmt: skip

ROWS = table(__file__, *COMPUTED, *STAY_OR_END)


@pytest.mark.parametrize("row", ROWS)
def test_ranks(rank_pool, row, tmp_path):
    row.check(rank_pool, tmp_path)


# --- windows that are dealt out by hand -------------------------------------------------------------------------------

HERE = "across.test_ranks_dealing"


def dealer_of(rank):
    """Return a dealer, and a function that returns a rank's window of tensors of some lengths."""
    split = autoaccum.ListOfSamples(list)

    def window(*lengths):
        return Window([[torch.full((length,), rank, dtype=torch.float32) for length in lengths[rank]]], split)

    return Dealer(all_ranks(Host()), split, lambda: False, lambda _: False, Notices()), window


def lengths_in(window):
    return [len(sample) for sample in window.each_sample()]


def dealt_in_turn(rank, size, windows, seconds):
    """Deal out equal windows where a token takes so many seconds; return the lengths held after each."""
    dealer, window = dealer_of(rank)
    costs, found = Costs.of_state([[1, 1, seconds], [1, 1000, 1000 * seconds]]), []
    for _ in range(windows):
        part = window([8, 6, 4], [1, 1, 1])
        dealer.deal(part, costs)
        found.append(lengths_in(part))
    return found


def without_room(rank, size, lacking):
    """Deal out samples of 80 MB where a rank has memory for none; return what is held, and what was printed."""
    dealer, window = dealer_of(rank)
    part, before = window([20_000_000] * 3, [1] * 3), resource.getrlimit(resource.RLIMIT_DATA)
    held = int(_status("VmData")) * 1024
    with contextlib.redirect_stderr(io.StringIO()) as spoken:
        if rank == lacking:
            resource.setrlimit(resource.RLIMIT_DATA, (held + (20 << 20), before[1]))
        try:
            dealer.deal(part, Costs())
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)
    return lengths_in(part), spoken.getvalue()


def peak_of_exchange(rank, size):
    """Return the bytes that dealing out took at most beside the samples of a rank, and those of a window's samples."""
    dealer, window = dealer_of(rank)
    part = window([8_000_000, 6_000_000, 4_000_000, 2_000_000], [500_000] * 4)
    Path("/proc/self/clear_refs").write_text("5")  # of the peak
    before = int(_status("VmRSS"))
    dealer.deal(part, Costs())
    return 1024 * (int(_status("VmHWM")) - before), 4 * 22_000_000, lengths_in(part)


def _status(name):
    """Return a number of /proc/self/status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{name}:"))


def test_rank_that_has_no_room_for_samples_leaves_them_where_they_are_on_all(rank_pool):
    first, second = rank_pool.run(f"{HERE}:without_room", 1, size=2)

    assert (first[0], second[0]) == ([20_000_000] * 3, [1] * 3)
    assert "since they cannot be sent to others (" in first[1]
    assert "allocate" in first[1]


def test_samples_are_not_sent_where_that_takes_longer_than_ranks_would_wait(rank_pool):
    for seconds, moved in ((1.0, [True] * 4), (1e-9, [True, False, False, False])):
        for found in rank_pool.run(f"{HERE}:dealt_in_turn", 4, seconds, size=2):
            as_loaded = [[8, 6, 4], [1, 1, 1]]
            assert [one not in as_loaded for one in found] == moved


def test_exchange_takes_no_more_than_the_samples_of_a_window_beside_those_of_a_rank(rank_pool):
    for peak, of_window, held in rank_pool.run(f"{HERE}:peak_of_exchange", size=2):
        assert sum(held) == 11_000_000  # so some were sent
        assert peak <= of_window
