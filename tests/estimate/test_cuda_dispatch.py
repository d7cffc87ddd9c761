import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from autoaccum._estimate.cuda_dispatch import CUBLAS_BYTES, CUBLAS_HOPPER_BYTES, attention, cublas_bytes
from autoaccum._estimate.fake_backward import backward, loosened
from autoaccum._estimate.gpus import known_gpus
from autoaccum._estimate.tracer import Ledger

pytestmark = pytest.mark.gpu_fakes

MIB = 1 << 20


class Operators(Ledger):
    def __init__(self):
        super().__init__(1, "cuda")
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.removeprefix("aten::"))
        return super().__torch_dispatch__(func, types, args, kwargs)


def attended(dtype=torch.bfloat16, mask=None):
    """Go forward and back through attention on a GPU that is not there; return the operators."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        query = torch.empty(2, 4, 128, 64, dtype=dtype, device="cuda:0", requires_grad=True)
        mask = None if mask is None else torch.empty(1, 1, 128, 128, dtype=mask, device="cuda:0")
        with Operators() as ledger:
            backward(loosened(attention(query, query, query, mask).sum()))
    return ledger.names


def test_halves_without_a_mask_go_to_flash_attention():
    assert {"_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"} <= set(attended())


@pytest.mark.parametrize("options", [{"dtype": torch.float32}, {"mask": torch.bool}, {"mask": torch.bfloat16}])
def test_others_go_to_the_memory_efficient_kernel(options):
    assert "_scaled_dot_product_efficient_attention" in attended(**options)


def test_heads_that_flash_attention_has_no_kernel_for_are_padded():
    with FakeTensorMode():
        query = torch.empty(2, 4, 16, 36, dtype=torch.bfloat16, device="cuda:0")
        assert attention(query, query, query).shape == query.shape


def test_every_kernel_gives_the_shape_that_attention_gives():
    with FakeTensorMode():
        for dtype in (torch.float32, torch.bfloat16):
            query = torch.empty(2, 4, 16, 32, dtype=dtype)
            expected = functional.scaled_dot_product_attention(query, query, query)
            on_gpu = query.to("cuda:0")
            assert attention(on_gpu, on_gpu, on_gpu).shape == expected.shape


def test_hopper_and_blackwell_have_the_larger_cublas_workspace():
    large = {gpu.name for gpu in known_gpus() if cublas_bytes(gpu.name) == CUBLAS_HOPPER_BYTES}

    assert large == {
        "h100-80gb", "h100-pcie-80gb", "h100-nvl-94gb", "gh200-96gb", "h200-141gb", "b200-180gb", "rtx-5090",
    }  # fmt: skip
    assert (CUBLAS_BYTES, CUBLAS_HOPPER_BYTES) == (8 * MIB + 128 * 1024, 32 * MIB)
