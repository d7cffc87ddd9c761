from autoaccum._estimate.allocation_trace import Category, Storage, Timeline
from autoaccum._estimate.step_memory import _POINTS, condensed


def timeline(steps=3):
    """A weight; activations of two layers; a temporary of 5 in backward, again and again."""
    storages = [
        Storage(100, Category.PARAMETERS, "", "a"),
        Storage(40, Category.MADE, "exp", "a"),
        Storage(30, Category.MADE, "exp", "b"),
        Storage(20, Category.LOSS, "mse", "(loss)"),
    ]
    events = [0, 1, 2, 3]
    for _ in range(steps):
        events += [len(storages), ~len(storages)]
        storages.append(Storage(5, Category.MADE, "mul", "b"))
    phases = [(0, "before"), (1, "forward"), (4, "backward"), (len(events), "optimizer")]
    return Timeline(8, storages, [*events, ~3, ~2, ~1], phases)


def test_the_peak_is_divided_among_kinds_and_modules():
    seen = condensed(timeline())

    assert seen.size == 8
    assert (seen.at_peak.phase, seen.at_peak.held_bytes) == ("backward", 195)
    assert seen.at_peak.bytes_by_kind == {"parameters": 100, "activations": 70, "loss": 20, "temporary": 5}
    assert {one.module: one.bytes_by_kind for one in seen.modules} == {
        "a": {"parameters": 100, "activations": 40},
        "b": {"activations": 30, "temporary": 5},
        "(loss)": {"loss": 20},
    }


def test_points_go_from_before_the_step_to_its_end():
    seen = condensed(timeline()).points

    assert (seen[0].event, seen[0].phase, seen[0].held_bytes) == (0, "before", 100)
    assert (seen[-1].phase, seen[-1].held_bytes) == ("optimizer", 100)
    assert [one.event for one in seen] == list(range(len(timeline().events)))


def test_a_long_step_keeps_its_peaks_in_few_points():
    long = timeline(steps=10_000)

    seen = condensed(long)

    assert len(seen.points) <= _POINTS + 1
    assert seen.at_peak.held_bytes == long.peak().live_bytes
    assert [one.event for one in seen.points] == sorted({one.event for one in seen.points})
    assert {one.held_bytes for one in seen.points if one.phase == "backward"} == {195}


def test_what_is_alive_is_named_by_who_made_it_largest_first():
    named = condensed(timeline()).alive

    assert [(one.kind, one.module, one.operator, one.tensors, one.held_bytes) for one in named[:3]] == [
        ("parameters", "a", "", 1, 100),
        ("activations", "a", "exp", 1, 40),
        ("activations", "b", "exp", 1, 30),
    ]


def test_a_step_without_events_has_one_point():
    assert condensed(Timeline(1)).at_peak.held_bytes == 0
