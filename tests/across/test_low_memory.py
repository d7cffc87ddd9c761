"""What saves memory and changes the mathematics: resumed, by several ranks, refused, and never chosen by itself."""

import sys

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum.errors import CheckpointError, DoesNotFitError, InvalidInputError
from helpers import assert_bitwise, needs_grad_dtype, state_of
from long_runs import Run, stopped_at
from rank_training import far

WEIGHTS = ("bf16", "bf16-master")


def of_8_bits(parameters):
    pytest.importorskip("torchao.optim", reason="torchao is not installed")
    return autoaccum.adamw8bit(parameters, lr=0.01)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def fit(model, **options):
    data = [(torch.randn(8, 64), torch.randint(0, 4, (8,)))] * 2
    usual = {"device": "cpu", "micro_batch": 4, "cache": False, "progress": False}
    return autoaccum.fit(model, data, 8, **usual | options)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize(
    ("weights", "optimizer"),
    [
        *(pytest.param(weights, adam, marks=needs_grad_dtype) for weights in WEIGHTS),
        (None, of_8_bits),
        pytest.param("bf16", of_8_bits, marks=needs_grad_dtype),
    ],
)
def test_resumed_run_ends_bit_for_bit_as_the_undisturbed_one(tmp_path, weights, optimizer):
    settings = {"weights": weights, "optimizer": optimizer, "clip_grad_norm": 0.5}
    whole = Run(**settings)
    whole.fit()
    stopped_at(4, tmp_path, **settings)
    last = Run(checkpoint=tmp_path, **settings)

    last.fit()

    assert last.end == whole.end


@needs_grad_dtype
def test_checkpoint_with_other_weights_is_refused(tmp_path):
    fit(network(), checkpoint=tmp_path, weights="bf16-master")

    with pytest.raises(CheckpointError, match=r"weights='bf16-master', and this call has weights='bf16'"):
        fit(network(), checkpoint=tmp_path, weights="bf16")


@pytest.mark.parametrize(
    ("weights", "optimizer"),
    [
        pytest.param("bf16", "adamw", marks=needs_grad_dtype),
        pytest.param("bf16-master", "adamw", marks=needs_grad_dtype),
        (None, "adamw8bit"),
    ],
)
def test_ranks_hold_the_same_weights_to_the_last_bit(crew, weights, optimizer):
    if optimizer == "adamw8bit":
        pytest.importorskip("torchao.optim", reason="torchao is not installed")

    one, other = crew.run("rank_low_memory:train", size=2, weights=weights, optimizer=optimizer)
    (alone,) = crew.run("rank_low_memory:train", size=1, weights=weights, optimizer=optimizer)

    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))
    assert far([each.float() for each in one], [each.float() for each in alone]) < 0.05


@pytest.mark.parametrize("saving", [{"memory": "auto"}, {"fallback": ["checkpoint"]}])
def test_neither_is_chosen_even_where_not_one_update_fits(capsys, saving):
    model = network()

    with pytest.raises(DoesNotFitError):
        fit(model, device=autoaccum.Simulated("90KiB"), micro_batch="auto", progress="lines", **saving)

    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert "optimizer: AdamW(lr=1e-3) (optimizer=None)" in capsys.readouterr().err


@needs_grad_dtype
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weights": "int8"}, "weights='int8'"),
        ({"precision": "fp16"}, "precision='fp16' in another type"),
        ({"precision": "fp32"}, "precision='fp32' in another type"),
        ({"optimizer": "adam8"}, "optimizer='adam8'"),
        ({"optimizer": lambda parameters: _Own(parameters, lr=0.1)}, "_Own is not known to"),
    ],
)
def test_what_cannot_be_is_refused_with_the_model_as_it_was(options, said):
    model = network()

    with pytest.raises(InvalidInputError, match=said):
        fit(model, **{"weights": "bf16"} | options)

    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


class _Own(torch.optim.SGD):
    """An optimizer of which nobody knows whether it looks at all parameters together."""


def fails_in_the_first_window(*_):
    raise ZeroDivisionError


@needs_grad_dtype
@pytest.mark.parametrize("probe", ["off", "before"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_fit_that_fails_before_an_update_leaves_weights_and_optimizer_bit_for_bit(weights, probe):
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.register_step_pre_hook(fails_in_the_first_window)  # which trials leave out
    before = state_of(model)
    settings = [{**group} for group in optimizer.param_groups]

    with pytest.raises(ZeroDivisionError):
        fit(
            model,
            weights=weights,
            optimizer=optimizer,
            probe=probe,
            micro_batch="auto",
            lr_scaling="linear",
            base_batch=4,
        )

    assert_bitwise(state_of(model), before)
    assert [{**group} for group in optimizer.param_groups] == settings
    assert not optimizer.state
    assert [one.grad_dtype for one in model.parameters()] == [torch.float32] * 4


@needs_grad_dtype
def test_gradients_have_the_type_of_weights_again_after_fit():
    model = network()

    fit(model, weights="bf16")

    assert [one.grad_dtype for one in model.parameters()] == [one.dtype for one in model.parameters()]


def test_missing_package_names_the_extra(monkeypatch):
    for name in ("torchao", "torchao.optim", "torchao.optim.subclass_8bit", "bitsandbytes"):
        monkeypatch.setitem(sys.modules, name, None)  # which makes Python say that there is none

    with pytest.raises(InvalidInputError, match=r"pip install 'autoaccum\[low-memory\]'") as caught:
        fit(network(), optimizer="adamw8bit")

    assert len(str(caught.value)) <= 3 * 120


def test_bitsandbytes_takes_the_place_of_a_missing_torchao(monkeypatch):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    for name in ("torchao", "torchao.optim", "torchao.optim.subclass_8bit"):
        monkeypatch.setitem(sys.modules, name, None)
    model = network()
    before = model[0].weight.detach().clone()

    fit(model, optimizer="adamw8bit")

    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_report_counts_the_bytes_of_the_optimizer_by_name(optimizer):
    pytest.importorskip("torchao.optim", reason="torchao is not installed")
    model = nn.Linear(1024, 1024, bias=False)

    report = autoaccum.preflight(
        model,
        (torch.randn(4, 1024), torch.randn(4, 1024)),
        4,
        optimizer=optimizer,
        gpus="h100-80gb",
        measure=False,
    )

    numbers = 1024 * 1024
    expected = {"adamw": 8 * numbers, "adamw8bit": 2 * numbers * (1 + 4 / 256)}[optimizer]
    assert report.predicted[0].estimate.footprints[0].optimizer_bytes == pytest.approx(expected, rel=1e-2)


# --- refusals ---------------------------------------------------------------------------------------------------------


class _Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 4, dtype=torch.complex64))

    def forward(self, inputs):
        return (inputs.to(torch.complex64) @ self.weight).real


def of_tokens():
    return nn.Sequential(nn.EmbeddingBag(64, 8, sparse=True), nn.Linear(8, 4))


def test_complex_parameters_are_refused_with_8_bits():
    model = _Complex()
    before = state_of(model)

    with pytest.raises(InvalidInputError, match="a parameter is complex; use AdamW"):
        fit(model, optimizer=of_8_bits)

    assert_bitwise(state_of(model), before)


def test_sparse_gradients_are_refused_with_8_bits_before_anything_changes():
    model = of_tokens()
    before = state_of(model)
    data = [(torch.randint(64, (8, 5)), torch.randint(0, 4, (8,)))]

    with pytest.raises(InvalidInputError, match=r"takes no sparse gradients; use torch\.optim\.SparseAdam there"):
        autoaccum.fit(model, data, 8, optimizer=of_8_bits, device="cpu", micro_batch=4, cache=False, progress=False)

    assert_bitwise(state_of(model), before)


@needs_grad_dtype
def test_model_in_fp16_is_refused_with_what_to_call():
    model = network().half()
    before = state_of(model)

    with pytest.raises(InvalidInputError, match=r"the model has some in fp16; call model\.float\(\) before"):
        fit(model, weights="bf16")

    assert_bitwise(state_of(model), before)


@pytest.mark.skipif(hasattr(torch.Tensor, "grad_dtype"), reason="this PyTorch takes weights=")
@pytest.mark.parametrize("weights", WEIGHTS)
def test_older_torch_is_told_which_one_it_takes(weights):
    model = network()

    with pytest.raises(InvalidInputError, match=r"requires PyTorch 2\.10 or later, and this is \d.*leave weights= out"):
        fit(model, weights=weights)

    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


# --- with other arguments ---------------------------------------------------------------------------------------------

EVERY = [
    *(pytest.param(weights, "adamw", marks=needs_grad_dtype) for weights in WEIGHTS),
    (None, of_8_bits),
    pytest.param("bf16", of_8_bits, marks=needs_grad_dtype),
]


@pytest.mark.parametrize(("weights", "optimizer"), EVERY)
def test_rates_are_scaled_for_the_target_batch(weights, optimizer):
    seen = []
    model = network()

    def made(parameters):
        seen.append(torch.optim.AdamW(parameters, lr=0.01) if optimizer == "adamw" else optimizer(parameters))
        return seen[0]

    fit(model, weights=weights, optimizer=made, lr_scaling="sqrt", base_batch=2)

    (group,) = seen[0].param_groups
    assert group["lr"] == pytest.approx(0.01 * 2)


@pytest.mark.parametrize(("weights", "optimizer"), EVERY)
def test_rate_falls_on_a_plateau(weights, optimizer):
    model, data = network(), [(torch.randn(8, 64), torch.randint(0, 4, (8,)))]
    seen = []

    def plateau(optimizer):
        seen.append(optimizer)
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e9)

    fit(model, weights=weights, optimizer=optimizer, scheduler=plateau, val_loader=data, epochs=3)

    began = 1e-3 if optimizer == "adamw" else 0.01
    assert seen[0].param_groups[0]["lr"] == pytest.approx(began / 8)


def end_of(model, **options):
    torch.manual_seed(3)
    fit(model, **options)
    return state_of(model)


@pytest.mark.parametrize(("weights", "optimizer"), EVERY)
def test_checkpointing_changes_no_bit(weights, optimizer):
    def deep():
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)]
        return nn.Sequential(*blocks, nn.Linear(64, 4))

    plain = end_of(deep(), weights=weights, optimizer=optimizer)

    saving = end_of(deep(), weights=weights, optimizer=optimizer, memory="checkpoint")

    assert_bitwise(saving, plain)


@pytest.mark.parametrize(("weights", "optimizer"), EVERY)
def test_loss_in_chunks_is_the_same_up_to_rounding(weights, optimizer):
    plain, chunked = (
        fit(network(), weights=weights, optimizer=optimizer, memory=memory) for memory in (None, "chunked_loss:2")
    )

    losses, others = ([report.loss for report in result.history] for result in (plain, chunked))
    assert chunked.memory == ("chunked_loss:2",)
    assert others == pytest.approx(losses, rel=2**-7)


@pytest.mark.parametrize(("weights", "optimizer"), EVERY)
def test_compiled_model_trains_as_the_plain_one_up_to_rounding(weights, optimizer):
    plain = fit(network(), weights=weights, optimizer=optimizer)
    model = network()
    model.compile(backend="aot_eager")
    compiled = fit(model, weights=weights, optimizer=optimizer)

    losses, others = ([report.loss for report in result.history] for result in (plain, compiled))
    assert others == pytest.approx(losses, rel=2**-6)


@pytest.mark.parametrize(("weights", "optimizer"), EVERY)
def test_several_optimizers_each_update_their_own(weights, optimizer):
    model = network()
    before = state_of(model)
    first = torch.optim.AdamW(model[0].parameters()) if optimizer == "adamw" else optimizer(model[0].parameters())
    second = torch.optim.SGD(model[2].parameters(), lr=0.1)

    fit(model, weights=weights, optimizer=[first, second])

    after = state_of(model)["values"]
    assert [name for name, value in before["values"].items() if torch.equal(after[name].float(), value)] == []
    assert {name: one.dtype for name, one in model.named_parameters() if one.dim() > 1} == dict.fromkeys(
        ("0.weight", "2.weight"), torch.float32 if weights is None else torch.bfloat16
    )


@needs_grad_dtype
def test_sizes_are_remembered_for_each_kind_of_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOACCUM_CACHE_DIR", str(tmp_path))

    for weights in (*WEIGHTS, "bf16"):
        fit(network(), weights=weights, cache=True, micro_batch="auto")

    assert len(list(tmp_path.rglob("plan-*.json"))) == 2
