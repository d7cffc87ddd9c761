import pytest
import torch
from torch import nn

from autoaccum._estimate.estimate import estimate_step, trace_step
from autoaccum._estimate.gpu_properties import GPUAnswers
from autoaccum._estimate.gpus import gpu_named
from autoaccum.errors import InvalidInputError

BATCH = torch.zeros(4, 64), torch.zeros(4, dtype=torch.long)


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


def answers(question, gpu):
    told = []

    estimate_step(Asks(lambda: told.append(question())), BATCH, gpu=gpu, sizes=[2])

    return set(told)


@pytest.mark.parametrize(
    ("name", "capability"), [("t4", (7, 5)), ("a100-40gb", (8, 0)), ("rtx-4090", (8, 9)), ("h100-80gb", (9, 0))]
)
@pytest.mark.gpu_fakes
def test_model_is_told_the_capability_of_the_gpu_it_is_predicted_for(name, capability):
    assert answers(torch.cuda.get_device_capability, gpu_named(name)) == {capability}


@pytest.mark.gpu_fakes
def test_model_is_told_name_memory_and_types_of_the_gpu():
    gpu = gpu_named("t4")

    for question, answer in (
        (torch.cuda.get_device_name, gpu.name),
        (lambda: torch.cuda.get_device_properties("cuda").total_memory, gpu.total_bytes),
        (lambda: torch.cuda.is_bf16_supported(including_emulation=False), False),
        (torch.cuda.is_tf32_supported, False),
    ):
        assert answers(question, gpu) == {answer}


@pytest.mark.gpu_fakes
def test_questions_are_answered_by_torch_again_after_the_trace():
    asked = torch.cuda.get_device_properties, torch.cuda.is_bf16_supported, torch.cuda.current_device

    answers(torch.cuda.get_device_capability, gpu_named("t4"))

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
        estimate_step(Asks(question), BATCH, gpu=gpu_named("h100-80gb"))


@pytest.mark.gpu_fakes
def test_trace_holds_for_the_gpus_that_would_have_told_the_model_the_same():
    ampere, ada, hopper = (gpu_named(name) for name in ("a10", "l4", "h100-80gb"))

    asking = trace_step(Wider(), BATCH, kind="cuda", gpu=ampere)
    silent = trace_step(nn.Linear(64, 10), BATCH, kind="cuda", gpu=ampere)

    assert asking.holds_for(ampere)
    assert asking.holds_for(gpu_named("rtx-3090"))
    assert not asking.holds_for(ada)
    assert silent.holds_for(hopper)


@pytest.mark.gpu_fakes
def test_each_gpu_is_predicted_on_the_way_that_the_model_takes_there():
    older, newer = (estimate_step(Wider(), BATCH, gpu=gpu_named(name)) for name in ("a100-80gb", "h100-80gb"))

    # The wide way's parameters have gradients and Adam's state: 16 bytes each less those of the parameters.
    wide = 64 * 4096 + 4096 + 4096 * 10 + 10
    assert newer.footprints[0].gradients_bytes >= 4 * wide
    assert newer.footprints[0].optimizer_bytes - older.footprints[0].optimizer_bytes >= 7 * wide


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a driver the GPU at hand answers")
def test_without_a_gpu_the_lowest_with_these_types_answers():
    for tensor_float, capability in ((True, (8, 0)), (False, (7, 0))):
        with GPUAnswers(tensor_float=tensor_float).given():
            assert torch.cuda.get_device_capability() == capability
