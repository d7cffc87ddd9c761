import pytest
import torch

from autoaccum._estimate.tracer import Ledger

FLOATS = 4


def sizes(ledger):
    """What came (+) and went (-), in order."""
    stored = ledger.timeline.storages
    return [stored[event].size_bytes if event >= 0 else -stored[~event].size_bytes for event in ledger.timeline.events]


def test_results_come_and_go_and_views_do_not_count():
    with Ledger(1, "cpu") as ledger:
        x = torch.ones(10)
        view = x.view(2, 5)[1]
        del x
        y = view + 1
        del view, y

    assert sizes(ledger) == [40, 20, -40, -20]


def test_storage_that_is_resized_is_counted_anew():
    with Ledger(1, "cpu") as ledger:
        kept = torch.empty(10)
        kept.resize_(30)

    assert sizes(ledger) == [40, -40, 120]


def test_workspace_is_held_until_the_results_exist():
    def workspace_of(func, args, result):
        return (7, 3) if func is torch.ops.aten.mul.Tensor else ()

    x = torch.ones(10)
    with Ledger(1, "cpu", workspace_of) as ledger:
        y = x * x

    assert sizes(ledger) == [7, 3, 40, -7, -3]
    del y


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_count_with_indices_and_values():
    with Ledger(1, "cpu") as ledger:
        embedding = torch.nn.Embedding(100, 8, sparse=True)
        embedding(torch.tensor([1, 2])).sum().backward()
        kept = [s.size_bytes for s in ledger.timeline.storages]

    assert 2 * 8 * FLOATS in kept
