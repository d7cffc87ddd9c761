"""A language model's logits are never whole, whatever its loss does to them, and its gradients stay the same."""

import contextlib
import copy
import functools
import pickle

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum._engine.chunked_logits import Logits, logits_of
from autoaccum._engine.chunked_recipe import chunked
from autoaccum._memory import Simulated
from autoaccum._system.notices import Notices
from autoaccum.errors import InvalidInputError
from faults import FailAt

V, D, T, N = 64, 16, 11, 3
TOKENS = torch.randint(3, V, (N, T), generator=torch.Generator().manual_seed(0))
LABELS = TOKENS.masked_fill(torch.arange(T) < torch.tensor([[4], [0], [7]]), -100)

SMALL = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"vocab_size": V, "n_embd": D, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
BERT = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
T5 = {"vocab_size": V, "d_model": D, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "pad_token_id": 0}
MODELS = {
    "tied": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "untied": ("LlamaForCausalLM", "LlamaConfig", SMALL | {"tie_word_embeddings": False}),
    "soft cap": ("Gemma2ForCausalLM", "Gemma2Config", SMALL | {"head_dim": 8, "final_logit_softcapping": 3.0}),
    "scaled": ("CohereForCausalLM", "CohereConfig", SMALL | {"logit_scale": 0.25}),
    "bias": ("BertForMaskedLM", "BertConfig", BERT),
    "encoder and decoder": ("T5ForConditionalGeneration", "T5Config", T5 | {"decoder_start_token_id": 0}),
}


def made(name):
    kind, config, options = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**options)).double()
    return model.eval()  # without dropout; gradients are those of training all the same


@contextlib.contextmanager
def in_chunks(model, monkeypatch, *, size=7, name=None):
    """Compute a model's logits a few tokens at a time; yields what was said."""
    said = []
    monkeypatch.setattr("autoaccum._engine.chunked_recipe.CHUNK", size)
    with chunked([model], name, said.append) as way:
        assert way
        yield said


def gradients(model, **batch):
    model.zero_grad()
    outputs = model(**batch)
    outputs.loss.backward()
    return outputs, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_have_the_same_loss_and_gradients(name, monkeypatch):
    model = made(name)
    expected, of_whole = gradients(model, input_ids=TOKENS, labels=LABELS)

    with in_chunks(model, monkeypatch) as said:
        found, of_chunks = gradients(model, input_ids=TOKENS, labels=LABELS)

        assert isinstance(found.logits, Logits)
        assert not said
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)  # Transformers sums in single precision
    torch.testing.assert_close(of_chunks, of_whole, rtol=1e-5, atol=1e-8)
    assert torch.equal(found.logits.argmax(-1), expected.logits.argmax(-1))
    torch.testing.assert_close(found.logits + 0.0, expected.logits)
    assert "forward" not in vars(model.get_output_embeddings())


class Plain(nn.Module):
    """A language model that returns logits, for losses of the user's own."""

    def __init__(self, cap=None):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.cap = cap
        self.double()

    def forward(self, input_ids):
        logits = self.head(self.tokens(input_ids).tanh())
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def shifted(logits, labels):
    logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return functional.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


def of_labels(values, labels):
    return torch.gather(values, dim=-1, index=labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)


WEIGHT = torch.linspace(0.5, 1.5, V, dtype=torch.float64)
IN_CHUNKS = {
    "shifted": shifted,
    "classes second": lambda logits, labels: functional.cross_entropy(logits.transpose(1, 2), labels),
    "permuted": lambda logits, labels: functional.cross_entropy(logits.permute(0, 2, 1), labels),
    "axes": lambda logits, labels: functional.cross_entropy(torch.movedim(logits, -1, 1), labels),
    "cast by name": lambda logits, labels: functional.cross_entropy(
        logits.to(dtype=torch.float64).type(torch.float64).flatten(0, 1), labels.flatten()
    ),
    "sum": lambda logits, labels: functional.cross_entropy(logits.reshape(-1, V), labels.reshape(-1), reduction="sum"),
    "each": lambda logits, labels: functional.cross_entropy(logits.mT, labels, reduction="none").sum(1).square().mean(),
    "smoothed": lambda logits, labels: functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1
    ),
    "weighted": lambda logits, labels: functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=WEIGHT),
    "padding of its own": lambda logits, labels: functional.cross_entropy(
        logits[:, 1:].flatten(0, 1), labels[:, 1:].clamp(min=0).flatten(), ignore_index=0
    ),
    "log_softmax": lambda logits, labels: functional.nll_loss(logits.log_softmax(-1).flatten(0, 1), labels.flatten()),
    "logsumexp": lambda logits, labels: shifted(logits, labels) + 1e-2 * logits.logsumexp(-1).square().mean(),
    "preference": lambda logits, labels: of_labels(logits.log_softmax(-1), labels).sum(1).sigmoid().mean(),
    "rows": lambda logits, labels: (
        torch.stack(
            [
                (of_labels(row, label) - torch.logsumexp(row, dim=-1)).sum()
                for row, label in zip(logits, labels, strict=True)
            ]
        )
        .square()
        .mean()
    ),
    "masked": lambda logits, labels: functional.cross_entropy(logits[labels != -100], labels[labels != -100]),
    "picked": lambda logits, labels: functional.cross_entropy(
        logits[:, [1, 5, 6]][:, 1:].flatten(0, 1), labels[:, [1, 5, 6]][:, 1:].flatten()
    ),
    "distribution": lambda logits, labels: of_labels(torch.softmax(logits, dim=-1), labels).mean(),
    "in place": lambda logits, labels: shifted(logits.div_(3.0), labels) + shifted(logits, labels),
    "module": lambda logits, labels: nn.CrossEntropyLoss()(logits.float().flatten(0, 1), labels.flatten()),
}
WHOLE = {
    "kl_div": lambda logits, labels: functional.kl_div(
        logits.log_softmax(-1), torch.full((N, T, V), 1.0 / V, dtype=torch.float64), reduction="batchmean"
    ),
    "mse_loss": lambda logits, labels: functional.mse_loss(logits, torch.zeros_like(logits)),
}


@pytest.mark.parametrize("cap", [None, 5.0], ids=["plain", "capped"])
@pytest.mark.parametrize("loss", IN_CHUNKS)
def test_losses_of_the_users_own_are_computed_in_chunks(loss, cap, monkeypatch):
    model = Plain(cap)
    expected = IN_CHUNKS[loss](model(TOKENS), LABELS)
    whole = torch.autograd.grad(expected, list(model.parameters()))

    with in_chunks(model, monkeypatch, name="head") as said:
        found = IN_CHUNKS[loss](model(TOKENS), LABELS)
        parts = torch.autograd.grad(found, list(model.parameters()))

    assert not said
    tolerance = {"rtol": 1e-6, "atol": 1e-8} if loss == "module" else {"rtol": 1e-12, "atol": 1e-14}
    torch.testing.assert_close(found, expected, **tolerance)
    torch.testing.assert_close(parts, whole, **tolerance)


@pytest.mark.parametrize("loss", WHOLE)
def test_other_losses_are_as_without_and_that_is_said(loss, monkeypatch):
    model = Plain()
    expected = torch.autograd.grad(WHOLE[loss](model(TOKENS), LABELS), list(model.parameters()))

    with in_chunks(model, monkeypatch, name="head") as said:
        found = torch.autograd.grad(WHOLE[loss](model(TOKENS), LABELS), list(model.parameters()))

    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert any(f"all logits at once ({loss})" in text for text in said)


def test_metrics_see_tensors(monkeypatch):
    model = Plain()
    expected = model(TOKENS)

    with in_chunks(model, monkeypatch, name="head") as said, torch.no_grad():
        logits = model(TOKENS)

        assert isinstance(logits, torch.Tensor)
        assert (logits.shape, logits.dtype, logits.device) == (expected.shape, expected.dtype, expected.device)
        assert logits[0, 0].tolist() == expected[0, 0].tolist()
        assert logits.numpy().shape == (N, T, V)
        torch.testing.assert_close(logits.softmax(-1), expected.softmax(-1))
        assert torch.equal(logits.topk(3).indices, expected.topk(3).indices)
        assert type(copy.deepcopy(logits.detach())) is torch.Tensor
        assert type(torch.cat([logits, logits])) is torch.Tensor
    assert not said  # nothing is kept for a backward pass


def test_copies_that_are_made_meanwhile_are_plain(monkeypatch):
    model = Plain()
    with in_chunks(model, monkeypatch, name="head"):
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - its own
            assert type(other(TOKENS)) is torch.Tensor
        assert type(model(TOKENS)) is Logits
    assert type(model(TOKENS)) is torch.Tensor


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_under_autocast_logits_are_in_half_precision_as_without(precision, monkeypatch):
    model = Plain().float()
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    with torch.autocast("cpu", kind):
        expected = shifted(model(TOKENS), LABELS)
    whole = torch.autograd.grad(expected, list(model.parameters()))

    with in_chunks(model, monkeypatch, name="head"):
        with torch.autocast("cpu", kind):
            logits = model(TOKENS)
            found = shifted(logits, LABELS)
        parts = torch.autograd.grad(found, list(model.parameters()))

    assert logits.dtype is kind
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(parts, whole, rtol=2e-2, atol=2e-3)


def test_logits_are_never_whole_where_they_are_large():
    vocabulary, peaks = 20_000, []
    for memory in (None, "chunked_loss:head"):
        torch.manual_seed(0)
        model = nn.ModuleDict({"tokens": nn.Embedding(100, 8), "head": nn.Linear(8, vocabulary, bias=False)})
        model.forward = lambda inputs, model=model: model["head"](model["tokens"](inputs))
        batch = torch.randint(100, (8, 512)), torch.randint(100, (8, 512))
        result = autoaccum.fit(
            model,
            [batch] * 2,
            8,
            loss=lambda logits, labels: functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
            memory=memory,
            micro_batch=8,
            device=Simulated(2**33),
            progress=False,
        )
        peaks.append(result.history[-1].peak_bytes)

    of_all = 8 * 512 * vocabulary * 4
    assert peaks[0] > 2 * of_all
    assert peaks[1] < of_all


def fit(model, **options):
    settings = {"micro_batch": 2, "progress": False, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)} | options
    return autoaccum.fit(model, [{"input_ids": TOKENS, "labels": LABELS}] * 4, 3, **settings)


def test_fit_trains_as_without_and_leaves_the_model_as_it_was(capsys):
    models = [made("tied") for _ in range(2)]

    fit(models[0])
    fit(models[1], memory="chunked_loss", progress="lines")

    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    said = capsys.readouterr().err
    assert "logits over 64 classes are computed at most 1,024 tokens at a time (memory='chunked_loss')" in said
    assert "forward" not in vars(models[1].get_output_embeddings())


@pytest.mark.parametrize("point", [3, 40, 90, 140, 200])
def test_memory_that_runs_out_at_any_operator_changes_nothing_but_rounding(point):
    found = []
    for points in ((), (point,)):
        model = made("soft cap")
        runner = autoaccum.Runner(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            autoaccum.plan(3, 2),
            device="cpu",
            precision="fp32",
            notices=Notices(silent=True),
        )
        for _ in range(4):  # in the first windows the loss is looked into
            runner.step({"input_ids": TOKENS, "labels": LABELS})
        with chunked([model], None, print), FailAt(*points) as faults:
            report = runner.step({"input_ids": TOKENS, "labels": LABELS})
        assert faults.hits == len(points) == report.oom_events
        found.append(list(model.parameters()))

    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-8)


def test_savings_are_taken_together():
    models = [made("untied") for _ in range(2)]

    fit(models[0])
    fit(models[1], memory=["chunked_loss", "checkpoint"])

    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert not models[1].model.gradient_checkpointing


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"memory": "chunks"}, "memory='chunks' is unknown"),
        ({"memory": ""}, "memory='' is unknown"),
        ({"memory": 3}, "memory=3 is neither a name nor a list"),
        ({"memory": "checkpoint:head"}, "memory='checkpoint:head' is unknown"),
        ({"memory": "chunked_loss:"}, "is unknown"),
        ({"memory": "chunked_loss"}, "no head found"),
        ({"memory": "chunked_loss:nothing"}, "'nothing' is not there"),
        ({"memory": "chunked_loss:tokens"}, "'tokens' is a Embedding"),
        ({"memory": "chunked_loss:layers"}, "'layers' is a ModuleList"),
        (
            {"memory": ["checkpoint", "checkpoint:2"]},
            "'checkpoint' and 'checkpoint:2' say the same twice",
        ),
        ({"memory": ["chunked_loss:head", "chunked_loss:head"]}, "say the same twice"),
        ({"memory": "checkpoint"}, "no repeated blocks"),
        ({"memory": "offload"}, "there; choose 'checkpoint'"),
        ({"memory": "checkpoint", "fallback": "checkpoint"}, "pass one of them"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_and_the_model_stays(options, text):
    model = Plain()
    model.layers = nn.ModuleList([nn.Linear(D, D)])

    with pytest.raises(InvalidInputError, match=text):
        fit(model, **options)

    assert type(model(TOKENS)) is torch.Tensor


def test_hidden_states_of_a_single_token_are_no_batch():
    head = nn.Linear(D, V)

    found = logits_of(print, 7, head, head.forward, torch.zeros(D))

    assert type(found) is torch.Tensor


def test_what_a_loss_asks_for_is_said_once():
    notices = Notices(silent=True)
    model = Plain()
    say = functools.partial(lambda text: notices.say(text, key=text))
    with chunked([model], "head", say):
        for _ in range(2):
            WHOLE["kl_div"](model(TOKENS), LABELS).backward()

    assert len(notices.texts) == 1


@pytest.mark.parametrize(
    "write",
    [
        lambda logits: logits.masked_fill_(logits > 1, 0.0),
        lambda logits: logits.__setitem__((..., 0), 0.0),
        lambda logits: logits.add_(1.0),
    ],
)
def test_logits_that_are_changed_in_place_are_refused(write, monkeypatch):
    with (
        in_chunks(model := Plain(), monkeypatch, name="head"),
        pytest.raises(InvalidInputError, match="changes logits in place"),
    ):
        write(model(TOKENS))


@pytest.mark.parametrize("asks", [lambda logits: logits.register_hook(torch.neg), torch.Tensor.retain_grad])
def test_hooks_on_the_gradient_of_logits_are_refused(asks, monkeypatch):
    with (
        in_chunks(model := Plain(), monkeypatch, name="head"),
        pytest.raises(InvalidInputError, match="gradient of logits that are never whole"),
    ):
        asks(model(TOKENS))


class Headed(Plain):
    """Its head is more than a linear layer, and draws nothing."""

    def __init__(self, draws=0.0):
        super().__init__()
        self.head = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Dropout(draws), nn.Linear(D, V)).double()


def test_head_of_several_layers_is_computed_in_chunks(monkeypatch):
    model = Headed()
    expected = torch.autograd.grad(shifted(model(TOKENS), LABELS), list(model.parameters()))

    with in_chunks(model, monkeypatch, name="head") as said:
        found = torch.autograd.grad(shifted(model(TOKENS), LABELS), list(model.parameters()))

    assert not said
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_head_that_drops_is_computed_again_with_the_same_masks(monkeypatch):
    model = Headed(draws=0.5)
    with in_chunks(model, monkeypatch, name="head"):
        torch.manual_seed(1)
        loss = shifted(model(TOKENS), LABELS)
        (found,) = torch.autograd.grad(loss, model.head[0].weight)
        small = []
        for sign in (1, -1):
            with torch.no_grad():
                model.head[0].weight[3, 4] += sign * 1e-6
                torch.manual_seed(1)
                small.append(float(shifted(model(TOKENS), LABELS)))
                model.head[0].weight[3, 4] -= sign * 1e-6

    assert float(found[3, 4]) == pytest.approx((small[0] - small[1]) / 2e-6, rel=1e-4)


# PEFT asks Transformers by a former name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_lora_around_the_head_is_computed_in_chunks(dropout, monkeypatch):
    peft = pytest.importorskip("peft")
    plain = made("untied").float()
    model = peft.get_peft_model(
        plain, peft.LoraConfig(r=4, target_modules=["lm_head", "q_proj"], lora_dropout=dropout, init_lora_weights=False)
    ).double()
    model.eval()
    batch = {"input_ids": TOKENS, "labels": LABELS}
    _, expected = gradients(model, **batch)

    with in_chunks(model, monkeypatch) as said:
        _, found = gradients(model, **batch)

    assert not said
    assert any("lm_head" in name and gradient is not None for name, gradient in found.items())
    for name, gradient in expected.items():
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-8, msg=name)
