"""memory="budget:SHARE" with compile=: compiled code keeps a share of its activations, and gradients stay the same."""

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum._engine.activation_budget import is_share
from fallback_models import Wide, seed
from rung_training import data

# Partitions as the usual backend does, and generates no code, which takes a minute.
COMPILE = {"backend": "aot_eager_decomp_partition"}


@pytest.fixture(autouse=True)
def _no_graphs_of_others():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Kept:
    """Counts the bytes that forward passes keep for the backward pass, and lacks memory for more than so many."""

    def __init__(self, model, capacity):
        self.own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.capacity = capacity
        self.most = 0

    def __call__(self, model, inputs):
        kept = {}

        def pack(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = model(inputs)
        found = sum(size for where, size in kept.items() if where not in self.own)
        if found > self.capacity:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {found} of {self.capacity}")
        self.most = max(self.most, found)
        return outputs


def plain():
    model = Wide()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.double()


def trained(memory, *, capacity=1 << 40, windows=4, compile=COMPILE, **options):  # noqa: A002 - as `fit` has it
    model = plain()
    kept = Kept(model, capacity)
    seed()
    result = autoaccum.fit(
        model,
        [(inputs.double(), targets) for inputs, targets in data(windows)],
        8,
        loss=nn.functional.cross_entropy,
        forward=lambda model, batch: kept(model, batch[0]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False),
        device="cpu",
        precision="fp32",
        memory=memory,
        compile=compile,
        cache=False,
        **{"micro_batch": 8, "progress": False} | options,
    )
    assert model._compiled_call_impl is None
    return model, result, kept.most


def test_compiled_code_keeps_less_and_gradients_are_the_same():
    expected, _, whole = trained(None)

    for share, most in ((0.5, 0.6), (0, 0.1)):
        model, result, kept = trained(f"budget:{share}")

        assert result.memory == (f"budget:{share}",)
        assert kept <= most * whole
        for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_backend_of_the_users_own_is_compiled_within_the_budget():
    graphs = []

    def backend(graph, inputs):
        graphs.append(torch._functorch.config.activation_memory_budget)
        return graph

    trained("budget:0.25", compile={"backend": backend})

    assert set(graphs) == {0.25}
    assert torch._functorch.config.activation_memory_budget == 1.0


@pytest.mark.slow
def test_usual_backend_keeps_less(capsys):
    _, _, whole = trained(None, compile=True, windows=2)
    _, _, kept = trained("budget:0", compile={"mode": "default"}, windows=2, progress="lines")

    assert kept <= 0.1 * whole
    assert "compiled code keeps 0% of its activations" in capsys.readouterr().err


@pytest.mark.slow
def test_auto_compares_budgets_by_the_clock():
    model, result, _ = trained("auto", capacity=12_000_000, windows=60, micro_batch="auto", strategy="balanced")
    expected, _, _ = trained(None, windows=60)

    assert {trial.memory for trial in result.memory_trials} > {(), ("budget:0.5",)}
    assert max(trial.micro_batch for trial in result.memory_trials if trial.micro_batch) > (
        result.memory_trials[0].micro_batch or 0
    )
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("memory", "compile", "told"),
    [
        ("budget:0.5", False, "pass compile=True with it, or memory='checkpoint'"),
        ("checkpoint", True, "which compile= does not see; pass memory='budget:0.5'"),
        ("chunked_loss", True, "which compile= does not see"),
        (["budget:0.5", "budget:0"], True, "compiled code has one budget"),
        ("budget", True, "is unknown"),
        ("budget:", True, "is unknown"),
        ("budget:1.5", True, "is unknown"),
        ("budget:-1", True, "is unknown"),
        ("budget:nan", True, "is unknown"),
    ],
)
def test_what_has_no_effect_is_refused(memory, compile, told):  # noqa: A002 - as `fit` has it
    with pytest.raises(autoaccum.InvalidInputError, match=told):
        trained(memory, compile=compile)


@pytest.mark.parametrize(
    "make",
    [
        autoaccum.Accumulator,
        lambda model, **options: autoaccum.Runner(
            model, torch.optim.SGD(model.parameters(), lr=0.1), autoaccum.plan(8, 8), **options
        ),
    ],
)
def test_loops_of_ones_own_do_not_compile_and_say_so(make):
    with pytest.raises(autoaccum.InvalidInputError, match="is the share of activations that compiled code keeps"):
        make(plain(), device="cpu", memory="budget:0.5")


@pytest.mark.parametrize("text", ["0", "1", "0.5", "0.125", "1.0"])
def test_shares(text):
    assert is_share(text)


@pytest.mark.parametrize("text", ["", "2", "0,5", ".5", "1.1", "-0.1", "1e-1", "0.", "50%", "\u0660"])
def test_other_texts_are_no_shares(text):
    assert not is_share(text)
