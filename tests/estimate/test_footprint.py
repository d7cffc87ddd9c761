from autoaccum._estimate.allocation_trace import Category, Storage, Timeline
from autoaccum._estimate.footprint import footprint_of

# A weight; activations of two layers; a loss; a temporary of 5 in backward.
STEP = Timeline(
    8,
    [
        Storage(100, Category.PARAMETERS, "", "a"),
        Storage(40, Category.MADE, "exp", "a"),
        Storage(30, Category.MADE, "exp", "b"),
        Storage(20, Category.LOSS, "mse", "(loss)"),
        Storage(5, Category.MADE, "mul", "b"),
    ],
    [0, 1, 2, 3, 4, ~4, ~3, ~2, ~1],
    [(0, "before"), (1, "forward"), (4, "backward"), (6, "optimizer")],
)


def test_the_peak_is_divided_among_kinds():
    seen = footprint_of(STEP)

    assert (seen.size, seen.phase, seen.peak_bytes, seen.reserved_bytes) == (8, "backward", 195, 195)
    held = {kind: size for kind, size in seen.bytes_by_kind.items() if size}
    assert held == {"parameters": 100, "activations": 70, "loss": 20, "temporary": 5}


def test_what_is_alive_is_named_by_who_made_it_largest_first():
    named = footprint_of(STEP).alive

    assert [(one.kind, one.module, one.operator, one.tensors, one.held_bytes) for one in named[:3]] == [
        ("parameters", "a", "", 1, 100),
        ("activations", "a", "exp", 1, 40),
        ("activations", "b", "exp", 1, 30),
    ]
