import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from autoaccum._estimate.cuda_dispatch import CUBLAS_BYTES, CUBLAS_HOPPER_BYTES, attention, cublas_bytes
from autoaccum._estimate.cuda_kernels import workspace
from autoaccum._estimate.fake_backward import backward, loosened
from autoaccum._estimate.gpus import known_cards
from autoaccum._estimate.tracer import Ledger

pytestmark = pytest.mark.card_fakes

MIB = 1 << 20


class Operators(Ledger):
    """A ledger that also notes what operators ran."""

    def __init__(self):
        super().__init__(1, "cuda", workspace)
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.removeprefix("aten::"))
        return super().__torch_dispatch__(func, types, args, kwargs)


def attended(length=128, *, heads=4, shared=4, width=64, dtype=torch.bfloat16, mask=None, **options):
    """Go forward and back through attention on a card that is not there; return operators and workspaces."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        query = torch.empty(2, heads, length, width, dtype=dtype, device="cuda:0", requires_grad=True)
        key, value = (
            torch.empty(2, shared, length, width, dtype=dtype, device="cuda:0", requires_grad=True) for _ in range(2)
        )
        mask = None if mask is None else torch.empty(1, 1, length, length, dtype=mask, device="cuda:0")
        with Operators() as ledger:
            loss = loosened(attention(query, key, value, mask, **options).sum())
            backward(loss)
    taken = [storage.size_bytes for storage in ledger.timeline.storages if storage.category.value == "workspace"]
    return ledger.names, taken


def test_halves_without_a_mask_go_to_flash_attention():
    names, _ = attended()

    assert "_scaled_dot_product_flash_attention" in names


@pytest.mark.parametrize("options", [{"dtype": torch.float32}, {"mask": torch.bool}, {"mask": torch.bfloat16}])
def test_others_go_to_the_memory_efficient_kernel(options):
    names, _ = attended(**options)

    assert "_scaled_dot_product_efficient_attention" in names


def test_flash_attention_sums_rows_and_the_querys_gradient_in_float32():
    _, taken = attended(length=100, width=40)

    rows = 2 * 4 * 128  # samples, heads, and the length rounded up
    assert taken == [rows * 4, rows * 64 * 4]


def test_flash_attention_makes_gradients_of_shared_keys_for_each_head():
    _, taken = attended(shared=2, enable_gqa=True)

    assert taken[2:] == 2 * [2 * 4 * 128 * 64 * 2]


def test_flash_attention_rounds_large_heads_to_64():
    _, taken = attended(width=160)

    assert taken[1] == 2 * 4 * 128 * 192 * 4


def test_heads_that_flash_attention_has_no_kernel_for_are_padded():
    with FakeTensorMode():
        query = torch.empty(2, 4, 16, 36, dtype=torch.bfloat16, device="cuda:0")
        assert attention(query, query, query).shape == query.shape


def test_efficient_attention_sums_halves_in_float32():
    _, of_halves = attended(mask=torch.bool)
    _, of_floats = attended(mask=torch.bool, dtype=torch.float32)

    assert of_halves == [2 * 4 * 128 * 4, 2 * 4 * (128 + 2 * 128) * 64 * 4]
    assert of_floats == [2 * 4 * 128 * 4]


def test_every_kernel_gives_the_shape_that_attention_gives():
    with FakeTensorMode():
        for dtype in (torch.float32, torch.bfloat16):
            query = torch.empty(2, 4, 16, 32, dtype=dtype)
            expected = functional.scaled_dot_product_attention(query, query, query)
            on_card = query.to("cuda:0")
            assert attention(on_card, on_card, on_card).shape == expected.shape


def test_hopper_and_blackwell_have_the_larger_cublas_workspace():
    large = {card.name for card in known_cards() if cublas_bytes(card.name) == CUBLAS_HOPPER_BYTES}

    assert large == {
        "h100-80gb", "h100-pcie-80gb", "h100-nvl-94gb", "gh200-96gb", "h200-141gb", "b200-180gb", "rtx-5090",
    }  # fmt: skip
    assert (CUBLAS_BYTES, CUBLAS_HOPPER_BYTES) == (8 * MIB + 128 * 1024, 32 * MIB)
