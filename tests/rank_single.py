"""Trainings of ranks that have a single sample of each window, or samples that are all alike, for tests of ranks."""

import contextlib
import io

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader

import autoaccum
from ragged import VOCABULARY, Causal, padded, texts


def over_tokens(logits, batch):
    """The mean over the tokens that count: a function of which nothing says so."""
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def summed(logits, batch):
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def by_samples(logits, batch):
    each = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    counts = batch["labels"] != -100
    return ((each.reshape(counts.shape) * counts).sum(1) / counts.sum(1)).mean()


def several(logits, batch):
    return {"tokens": over_tokens(logits, batch), "samples": by_samples(logits, batch)}


LOSSES = {"tokens": over_tokens, "sum": summed, "samples": by_samples, "several": several}


class Logits(nn.Module):
    """Scores for each token, in double precision."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, 8).double()
        self.head = nn.Linear(8, VOCABULARY).double()

    def forward(self, batch):
        return self.head(self.tokens(batch["input_ids"]))


def batches(lengths, size, each, *, wide=True):
    """Lists of batches, one for each rank, that take turns; all of them as wide as the longest text if `wide`."""
    width = max(lengths) if wide else None
    given = texts(*lengths)
    cut = [padded(given[at : at + each], width) for at in range(0, len(given), each)]
    return [cut[rank::size] for rank in range(size)]


def train(rank, size, lengths, loss="tokens", each=1, *, wide=True, **options):
    """Train on this rank's own samples; return parameters and what was said."""
    loader = batches(lengths, size, each, wide=wide)[rank]
    if options.pop("held", False):
        loader = [batch | {"held": lambda: None} for batch in loader]  # which no other process can be sent
    asked = Asked(lacks=rank == options.pop("lacking", None))
    with contextlib.redirect_stderr(io.StringIO()) as said:
        _, model = run(loader, loss, target_batch=each * size, progress="lines", forward=asked, **options)
    return {"parameters": flat(model), "said": said.getvalue(), "rank": rank}


def of_three_batches(lengths):
    """A loader of 2, 6 and the other texts."""
    cut = [range(2), range(2, 8), range(8, len(lengths))]
    return DataLoader(texts(*lengths), batch_sampler=cut, collate_fn=padded)


def share(rank, size, lengths):
    """Train on this rank's part of a loader's windows of one sample a rank."""
    _, model = run(of_three_batches(lengths), "own", target_batch=size, shard=True)
    return flat(model)


def train_sharded(rank, size, lengths, loss="tokens", each=1, **options):
    """Train a model of which each rank holds a shard; return all of its parameters."""
    loader = batches(lengths, size, each)[rank]
    model = fully_shard(Logits() if loss != "own" else Causal())
    run(loader, loss, target_batch=each * size, model=model, **options)
    return torch.cat([parameter.full_tensor().detach().flatten() for parameter in model.parameters()])


class Asked:
    """Calls the model, and may lack memory when it is asked what its loss runs over."""

    def __init__(self, *, lacks=False):
        self.lacks = lacks

    def __call__(self, model, batch):
        if not torch.is_grad_enabled() and self.lacks:
            raise torch.OutOfMemoryError("CUDA out of memory: asked")
        return model(batch)


def run(loader, loss="tokens", *, target_batch, forward=None, model=None, **options):
    """Train; return the result and the model."""
    model = model or (Causal() if loss == "own" else Logits())
    own = {} if loss == "own" else {"loss": LOSSES[loss], "forward": forward or Asked()}
    result = autoaccum.fit(
        model,
        loader,
        target_batch,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        device="cpu",
        precision="fp32",
        **own,
        **{"progress": False, "shard": False} | options,
    )
    return result, model


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
