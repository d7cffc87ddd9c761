"""What a run may be made of, and where it is stopped: `RESUMES`, whose runs go on as if nothing had happened."""

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

from autoaccum._engine.optimizers import OptimizerList  # fit makes one of a function's optimizers for a single model
from support.training.long_runs import BATCH, EPOCHS, SAMPLES, STEPS_PER_EPOCH, Model, Noisy, loader_of

STEPS = EPOCHS * STEPS_PER_EPOCH
LR = torch.optim.lr_scheduler

# --- models -----------------------------------------------------------------------------------------------------------


class Changing(Model):
    """Makes a buffer that was None, and lets one that no state_dict holds grow."""

    def __init__(self):
        super().__init__()
        self.register_buffer("later", None)
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, inputs):
        outputs = super().forward(inputs)
        self.later = outputs.detach().mean(0) + (0.0 if self.later is None else self.later)
        self.cache = torch.cat([self.cache, outputs.detach().sum().reshape(1)])
        return outputs + 0.1 * self.later.sum() + 0.1 * self.cache.sum()


class Following(nn.Module):
    """Follows its first layer, in each pass, with a target network: frozen parameters."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.target = nn.Linear(6, 8).requires_grad_(requires_grad=False)
        self.passes = nn.Parameter(torch.zeros(()), requires_grad=False)

    @torch.no_grad()
    def follow(self):
        self.passes += 1
        for own, followed in zip(self.target.parameters(), self.first.parameters(), strict=True):
            own.lerp_(followed, 0.1)

    def forward(self, inputs):
        self.follow()
        return self.last(torch.relu(self.first(inputs))) + self.target(inputs).mean(1, keepdim=True)


class Weighted(nn.Module):
    """A loss with a parameter."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(3))

    def forward(self, outputs, batch):
        return nn.functional.cross_entropy(outputs * self.factor, batch[1])


def with_a_loss_that_learns():
    loss = Weighted()
    return {"loss": loss, "optimizer": lambda it: torch.optim.Adam([*it, *loss.parameters()], lr=0.1)}


def large(outputs, batch):
    """A loss for which the first scale of a gradient scaler is too large: it is halved, window by window."""
    return 30 * nn.functional.cross_entropy(outputs.float(), batch[1])


# --- optimizers -------------------------------------------------------------------------------------------------------


class WiderMoments(torch.optim.Optimizer):
    """Keeps its state in a wider type than its parameters, which torch's own load_state_dict narrows."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter, dtype=torch.float64))
                mean.mul_(0.9).add_(parameter.grad.double(), alpha=0.1)
                parameter.sub_(mean, alpha=group["lr"])


def sgd_with_momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)


def adamw_in_two_groups(parameters):
    groups = [{"params": parameters[:2], "lr": 0.02}, {"params": parameters[2:]}]
    return torch.optim.AdamW(groups, amsgrad=True)


def several(parameters):
    return OptimizerList([torch.optim.SGD(parameters[:2], lr=0.01, momentum=0.9), torch.optim.Adam(parameters[2:])])


def plateau(optimizer):
    return LR.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1.0)  # nothing is ever good enough


# --- loaders ----------------------------------------------------------------------------------------------------------


class Quiet(Noisy):
    """Draws nothing: the generators of some workers are nobody's to set."""

    def __getitem__(self, index):
        return self.inputs[index], index % 3, index


class Numbers(IterableDataset):
    def __iter__(self):
        data = Noisy()
        for index in torch.randperm(SAMPLES).tolist():
            yield data[index]


class Stateful:
    """A loader of batches of these sizes that counts how often it is asked for its state."""

    def __init__(self, sizes):
        self.sizes, self.data = sizes, Noisy()
        self.at = self.asked = 0

    def __iter__(self):
        at, self.at = self.at, 0
        for place, size in enumerate(self.sizes):
            if place < at:
                continue
            self.at = place + 1
            start = sum(self.sizes[:place])
            yield default_collate([self.data[index] for index in range(start, start + size)])
        self.at = 0

    def state_dict(self):
        self.asked += 1
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


ALIKE = (4,) * 12 + (2,)
UNEVEN = (1, 20, 1, 7, 2, 2, 1, 14, 2)
# A sample counts as many as its largest tensor has elements, 6.
OF_TOKENS = {"target_tokens": 12 * 6, "micro_batch": 30}


def seeded():
    return torch.Generator().manual_seed(11)


def random_sampler(*, replacement=False):
    return RandomSampler(range(SAMPLES), replacement=replacement, generator=seeded())


def sampled(sampler):
    return loader_of(Noisy(), shuffle=False, sampler=sampler)


def lists():
    return list(loader_of(Noisy(), shuffle=False))


def stateful(data=Noisy, **options):
    return {"loader": lambda: loader_of(data(), StatefulDataLoader, **options)}


# --- the table --------------------------------------------------------------------------------------------------------

# The changes of `Run`, or a function that makes them, and where to stop: after a window by an error, after two in turn,
# or where a call with such changes ends.
RESUMES = {
    "plain": ({}, [1, 3, STEPS_PER_EPOCH, STEPS_PER_EPOCH + 1, STEPS]),
    "more epochs after the end": ({"epochs": EPOCHS + 2}, [{"epochs": EPOCHS}]),
    "more steps after the end": ({"max_steps": 8}, [{"max_steps": 3}, {"max_steps": STEPS_PER_EPOCH}]),
    "last window left out": ({"drop_last": True}, [6]),
    "scaled learning rate": ({"lr_scaling": "linear", "base_batch": 4}, [(4, 8)]),
    "gradient scaler": ({"precision": "fp16", "loss": large}, [8]),
    "noise scale": ({"noise_scale": 2}, [7]),
    "loss with parameters": (with_a_loss_that_learns, [7]),
    "buffers that come and grow": ({"model": Changing, "val_loader": None}, [8]),
    "frozen parameters that passes move": ({"model": Following, "loss_reduction": None}, [2, 6, 10]),
    "evaluations within epochs": ({"val_every": 4, "scheduler": plateau}, [1, 4, 5, 6, 10, 14]),
    # schedulers and optimizers
    "OneCycleLR": ({"scheduler": lambda it: LR.OneCycleLR(it, 0.05, total_steps=STEPS)}, [8]),
    "SequentialLR": (
        {"scheduler": lambda it: LR.SequentialLR(it, [LR.ConstantLR(it), LR.ExponentialLR(it, 0.9)], [4])},
        [8],
    ),
    "ReduceLROnPlateau": ({"scheduler": plateau}, [8]),
    "scheduler of epochs": ({"scheduler_interval": "epoch"}, [STEPS_PER_EPOCH, 8]),
    "SGD with momentum": ({"optimizer": sgd_with_momentum}, [8]),
    "AdamW in two groups": ({"optimizer": adamw_in_two_groups}, [8]),
    "optimizer with wider state": ({"optimizer": WiderMoments}, [8]),
    "several optimizers": ({"optimizer": several}, [1, 7]),
    # loaders that are wound
    "generator of the loader": (
        {"loader": lambda: loader_of(Noisy(), generator=torch.Generator().manual_seed(11))},
        [2],
    ),
    "generator of the sampler": ({"loader": lambda: sampled(random_sampler())}, [STEPS_PER_EPOCH]),
    "generator behind a batch sampler": (
        {"loader": lambda: DataLoader(Noisy(), batch_sampler=BatchSampler(random_sampler(), BATCH, drop_last=False))},
        [8],
    ),
    "sampler with replacement": ({"loader": lambda: sampled(random_sampler(replacement=True))}, [2]),
    "iterable dataset": ({"loader": lambda: loader_of(Numbers(), shuffle=False)}, [STEPS_PER_EPOCH]),
    "list of batches": ({"loader": lists}, [8]),
    "batches larger than a window": ({"loader": lambda: loader_of(Noisy(), batch_size=30)}, [2]),
    "batches as large as a window": ({"loader": lambda: loader_of(Noisy(), batch_size=12)}, [STEPS_PER_EPOCH]),
    "generator that can be read once": ({"loader": lambda: iter(lists())}, [2]),
    "workers": ({"loader": lambda: loader_of(Noisy(), num_workers=2)}, [8]),
    "workers that stay": ({"loader": lambda: loader_of(Quiet(), num_workers=2, persistent_workers=True)}, [8]),
    # loaders with a state
    "stateful": (stateful(), [3, STEPS_PER_EPOCH, 7, {"epochs": 1}]),
    "stateful, workers": (stateful(Quiet, num_workers=2), [7]),
    "stateful, uneven": ({"loader": lambda: Stateful(UNEVEN)}, [1, STEPS_PER_EPOCH]),
    "stateful, tokens": ({"loader": lambda: Stateful(ALIKE)} | OF_TOKENS, [2]),
    "stateful, uneven, tokens": ({"loader": lambda: Stateful(UNEVEN)} | OF_TOKENS, [3]),
}


def changes_of(name):
    changes, _ = RESUMES[name]
    return changes() if callable(changes) else changes
