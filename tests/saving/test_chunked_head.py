"""save_memory="chunked_loss": the logits of Transformers' models are never whole, and their gradients stay the same."""

import contextlib

import pytest
import torch
import transformers
from torch.nn import functional

import autoaccum
from autoaccum._saving.chunked_head import chunked
from autoaccum._saving.unmade_logits import UnmadeLogits
from autoaccum.errors import InvalidInputError, SavingRefusedError
from support.models.small import one_in

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
SOFT_CAP = SMALL | {"head_dim": 8, "final_logit_softcapping": 3.0}
MODELS = {
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", SMALL | {"tie_word_embeddings": False}),
    "Llama, tied": ("LlamaForCausalLM", "LlamaConfig", SMALL | {"tie_word_embeddings": True}),
    "Qwen": ("Qwen3ForCausalLM", "Qwen3Config", SMALL | {"head_dim": 8}),
    "Gemma": ("Gemma2ForCausalLM", "Gemma2Config", SOFT_CAP),
    "Gemma 3": ("Gemma3ForCausalLM", "Gemma3TextConfig", SOFT_CAP),
    "Cohere": ("CohereForCausalLM", "CohereConfig", SMALL | {"logit_scale": 0.25}),
    "BERT": ("BertForMaskedLM", "BertConfig", BERT),
    "T5": ("T5ForConditionalGeneration", "T5Config", T5 | {"decoder_start_token_id": 0}),
}


def made(name):
    kind, config, options = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**options)).double()
    return model.eval()  # without dropout; gradients are those of training all the same


@pytest.fixture(autouse=True)
def few_tokens_at_a_time(monkeypatch):
    monkeypatch.setattr("autoaccum._saving.chunked_loss.CHUNK", 7)


@contextlib.contextmanager
def in_chunks(model):
    with chunked([model]) as way:
        assert way
        yield


def gradients(model, **batch):
    model.zero_grad()
    outputs = model(**batch)
    outputs.loss.backward()
    return outputs, {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def test_sum_over_a_number_of_items_has_the_same_gradients_and_logits_are_there_without():
    model = made("Llama, tied")
    expected, of_whole = gradients(model, input_ids=TOKENS, labels=LABELS, num_items_in_batch=29)

    with in_chunks(model):
        found, of_chunks = gradients(model, input_ids=TOKENS, labels=LABELS, num_items_in_batch=29)
        with torch.no_grad():
            logits = model(input_ids=TOKENS, labels=LABELS).logits

    assert isinstance(found.logits, UnmadeLogits)
    torch.testing.assert_close(logits, expected.logits)  # where no gradient is computed they are as ever
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)  # Transformers sums in single precision
    torch.testing.assert_close(of_chunks, of_whole, rtol=1e-5, atol=1e-8)
    assert "forward" not in vars(model.get_output_embeddings())


REFUSED = {
    "log_softmax": lambda logits: logits.log_softmax(-1).max(),
    "logsumexp": lambda logits: torch.logsumexp(logits, dim=1),
    "scaled by a tensor": lambda logits: torch.ones(V) * logits,
    "written": lambda logits: logits.__setitem__(0, 0.0),
    "of some classes": lambda logits: logits[..., :5],
    "other dimension": lambda logits: functional.cross_entropy(logits, torch.zeros(N, V, dtype=torch.long)),
    "exchanged": lambda logits: logits.transpose(0, 1).mT,
    "distribution": lambda logits: functional.cross_entropy(logits.flatten(0, 1), torch.ones(N * T, V) / V),
    "list": lambda logits: logits.tolist(),
    "joined": lambda logits: torch.cat([logits, logits]),
    "gradient": lambda logits: logits.register_hook(torch.neg),
}


@pytest.mark.parametrize("asks", REFUSED)
def test_whatever_else_asks_for_logits_is_refused(asks):
    with in_chunks(model := made("GPT-2")), pytest.raises(SavingRefusedError, match="logits that are never made"):
        REFUSED[asks](model(TOKENS).logits)


def fit(model, **options):
    settings = {"micro_batch": 2, "progress": False, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)} | options
    return autoaccum.fit(model, [{"input_ids": TOKENS, "labels": LABELS}] * 4, 3, **settings)


@pytest.mark.parametrize("name", one_in(3, MODELS))
def test_fit_trains_as_without_over_micro_batches_of_unlike_counts(name, capsys):
    models = [made(name) for _ in range(2)]

    fit(models[0], micro_batch=3)
    result = fit(models[1], save_memory="chunked_loss", micro_batch=1, progress="lines")

    assert result.savings == ("chunked_loss",)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert (
        "the loss over 64 classes is computed at most 1,024 tokens at a time (save_memory=" in capsys.readouterr().err
    )
    assert "forward" not in vars(models[1].get_output_embeddings())


class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = torch.nn.Embedding(V, D), torch.nn.Linear(D, V)

    def forward(self, tokens):
        return self.head(self.tokens(tokens))


def test_model_that_does_not_tell_its_head_is_refused_and_stays():
    model = Own()

    with pytest.raises(InvalidInputError, match=r"get_output_embeddings.*autoaccum\.ChunkedLoss"):
        fit(model, save_memory="chunked_loss")

    assert type(model(TOKENS)) is torch.Tensor
