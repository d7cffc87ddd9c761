"""A model that asks about the GPU is told of the one that it is predicted for."""

import pytest
import torch
from torch import nn

from autoaccum import preflight
from autoaccum._estimate.gpu_properties import GPUAnswers  # the last test: no public call traces for no GPU
from autoaccum._estimate.gpus import gpu_named
from autoaccum.errors import InvalidInputError

BATCH = torch.zeros(4, 64), torch.zeros(4, dtype=torch.long)
T4 = gpu_named("t4")


class Asks(nn.Linear):
    """Asks about the GPU in its forward pass, as Transformers' mixtures of experts do."""

    def __init__(self, question):
        super().__init__(64, 10)
        self.question = question

    def forward(self, x):
        if x.is_cuda:
            self.question()
        return super().forward(x)


class Wider(nn.Module):
    """Takes a wider way on GPUs from Hopper on."""

    def __init__(self):
        super().__init__()
        self.narrow, self.wide = nn.Linear(64, 10), nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 10))

    def forward(self, x):
        is_new = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
        return (self.wide if is_new else self.narrow)(x)


def predicted(model, *gpus):
    return preflight(model, BATCH, 4, gpus=gpus, measure=False, loss=nn.functional.cross_entropy).predicted


ANSWERS = [
    ("t4", torch.cuda.get_device_capability, (7, 5)),
    ("a100-40gb", torch.cuda.get_device_capability, (8, 0)),
    ("rtx-4090", torch.cuda.get_device_capability, (8, 9)),
    ("h100-80gb", torch.cuda.get_device_capability, (9, 0)),
    ("t4", torch.cuda.get_device_name, T4.name),
    ("t4", lambda: torch.cuda.get_device_properties("cuda").total_memory, T4.total_bytes),
    ("t4", lambda: torch.cuda.is_bf16_supported(including_emulation=False), False),
    ("t4", torch.cuda.is_tf32_supported, False),
]


@pytest.mark.gpu_fakes
@pytest.mark.parametrize(("gpu", "question", "answer"), ANSWERS)
def test_model_is_told_of_the_gpu_it_is_predicted_for_and_torch_answers_again_after_that(gpu, question, answer):
    asked = torch.cuda.get_device_properties, torch.cuda.is_bf16_supported, torch.cuda.current_device
    told = []

    predicted(Asks(lambda: told.append(question())), gpu)

    assert set(told) == {answer}
    assert asked == (torch.cuda.get_device_properties, torch.cuda.is_bf16_supported, torch.cuda.current_device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a driver it is answered")
@pytest.mark.parametrize(
    ("question", "named"),
    [
        (torch.cuda.mem_get_info, "driver"),
        (lambda: torch.cuda.get_device_properties(0).multi_processor_count, "multi_processor_count"),
    ],
)
@pytest.mark.gpu_fakes
def test_question_that_only_the_gpu_can_answer_is_named(question, named):
    with pytest.raises(InvalidInputError, match=rf"cannot be traced without values: .*{named}"):
        predicted(Asks(question), "h100-80gb")


@pytest.mark.gpu_fakes
def test_each_of_several_gpus_is_predicted_on_the_way_that_the_model_takes_there():
    names = ["a10", "rtx-3090", "a100-80gb", "h100-80gb"]

    together = predicted(Wider(), *names)

    assert [one.footprint for one in together] == [predicted(Wider(), name)[0].footprint for name in names]
    # The wide way's parameters have gradients and Adam's state: 16 bytes each less those of the parameters.
    wide = 64 * 4096 + 4096 + 4096 * 10 + 10
    *_, older, newer = (one.footprint for one in together)
    assert newer.gradients_bytes >= 4 * wide
    assert newer.optimizer_bytes - older.optimizer_bytes >= 7 * wide


@pytest.mark.gpu_fakes
def test_gpus_that_tell_the_model_the_same_are_predicted_by_one_trace():
    def asked(*gpus):
        told = []
        predicted(Asks(lambda: told.append(torch.cuda.get_device_capability())), *gpus)
        return len(told)

    assert asked("a10", "rtx-3090") == asked("a10") < asked("a10", "l4")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a driver the GPU at hand answers")
def test_without_a_gpu_the_lowest_with_these_types_answers():
    for tensor_float, capability in ((True, (8, 0)), (False, (7, 0))):
        with GPUAnswers(tensor_float=tensor_float).given():
            assert torch.cuda.get_device_capability() == capability
