"""Quick fakes have the shapes, types, strides and storages that PyTorch's own have."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autoaccum._estimate.quick_fakes import QuickFakes

aten = torch.ops.aten
SHAPES = ((4, 6), (4, 6, 10), (4, 6, 8, 8), (4, 6, 4, 4, 4))


def form(value):
    return None if value is None else (value.shape, value.dtype, value.stride(), value.storage_offset(), value.device)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.gpu_fakes
def test_batch_norm_is_as_pytorch_fakes_it(device, dtype, layout, shape):
    if layout is torch.channels_last and len(shape) != 4:
        pytest.skip("only images have that layout")
    with FakeTensorMode():
        source = torch.empty(shape, dtype=dtype, device=device).to(memory_format=layout)
        channels = [torch.empty(shape[1], device=device) for _ in range(4)]
        args = (source, *channels, True, 0.1, 1e-5)
        result, gradient, fakes = aten.native_batch_norm(*args), torch.empty_like(source), QuickFakes()
        for mask in itertools.product([True, False], repeat=2):
            back = (gradient, source, channels[0], *channels[2:], *result[1:], True, 1e-5, [True, *mask])

            expected = aten.native_batch_norm_backward(*back)

            for _ in range(2):
                quick = fakes.run(aten.native_batch_norm_backward.default, back, {})
                assert list(map(form, quick)) == list(map(form, expected))
        for _ in range(2):
            assert list(map(form, fakes.run(aten.native_batch_norm.default, args, {}))) == list(map(form, result))


CALLS = [
    (aten.add.Tensor, lambda x: (x, 1)),
    (aten.add_.Tensor, lambda x: (x, x)),
    (aten.t.default, lambda x: (x,)),
    (aten.split.Tensor, lambda x: (x, 2)),
    (aten.select.int, lambda x: (x, 0, 1)),
    (aten.mm.default, lambda x: (x, x.t())),
    (aten.cat.default, lambda x: ([x, x],)),
    (aten.max.dim, lambda x: (x, 1)),
    (aten._to_copy.default, lambda x: (x,)),
    (aten.native_batch_norm.default, lambda x: (x.float(), *(torch.empty(6) for _ in range(4)), False, 0.1, 1e-5)),
    (aten.squeeze_.default, lambda x: (x.unsqueeze(0),)),
    (aten.resize_.default, lambda x: (x.clone(), [2])),
]


@pytest.mark.parametrize(("func", "arguments"), CALLS)
def test_what_is_made_quickly_is_as_pytorch_makes_it(func, arguments):
    def made_by(run):
        args = arguments(x)
        made = run(func, args, {})
        several = made if isinstance(made, tuple | list) else [made]
        given = [one for one in torch.utils._pytree.tree_leaves(args) if isinstance(one, torch.Tensor)]
        shares = [[one.untyped_storage()._cdata == of.untyped_storage()._cdata for of in given] for one in several]
        return list(map(form, several)), shares, [one is args[0] for one in several], form(given[0])

    with FakeTensorMode():
        x, fakes = torch.empty(4, 6), QuickFakes()

        expected = made_by(lambda func, args, _: func(*args))

        assert [made_by(fakes.run) for _ in range(3)] == [expected] * 3


def test_a_whole_number_is_not_a_fraction():
    with FakeTensorMode():
        x, fakes = torch.ones(2, dtype=torch.int64), QuickFakes()
        made = [fakes.run(aten.add.Tensor, (x, number), {}).dtype for number in (1, 1.0, True, 1, 1.0)]

    assert made == [torch.int64, torch.float32, torch.int64, torch.int64, torch.float32]
