"""Trains small models with two features of `fit` at once, and again in a plain loop.

The plain loop knows nothing of autoaccum. It is given the inputs of each forward pass from which an update was made,
and the random state before it; it runs them, computes the loss of the whole window once, and steps.
"""

import contextlib
import io
import itertools
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional

import autoaccum

TARGET, WINDOWS, BATCH = 12, 4, 6
CLASSES, WIDTH, LENGTH, WORDS = 3, 8, 5, 11
TOKENS = {"convolutional": 240}  # 36 numbers a sample

FEATURES = (
    "target_tokens",
    "noise_scale",
    "loss_scope",
    "batchnorm",
    "several losses",
    "pair",
    "checkpoint",
    "offload",
    "chunked loss",
    "evaluation",
    "callbacks",
    "resume",
    "clipping",
    "scaler",
    "optimizers",
    "split",
    "ranks",
    "out of memory",
)
MODELS = ("mlp", "convolutional", "gpt", "lstm")


def pairs(name):
    """Return all pairs of features that a model can have, each feature alone, and none."""
    features = [one for one in FEATURES if one != "chunked loss" or name == "gpt"]
    return [(), *((one,) for one in features), *itertools.combinations(features, 2)]


def each_once(name):
    """Return pairs in which each feature of a model occurs once, with another one than of other models."""
    features = [alone[0] for alone in pairs(name) if len(alone) == 1]
    step = 1 + 2 * MODELS.index(name)
    order = [features[step * place % len(features)] for place in range(len(features))]
    return [tuple(order[at : at + 2]) for at in range(0, len(order), 2)]


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear, self.drop = nn.Linear(width, width), nn.Dropout(0.2)

    def forward(self, inputs):
        return inputs + self.drop(torch.tanh(self.linear(inputs)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.drop = nn.LSTM(2, WIDTH, batch_first=True), nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs):
        return self.head(self.drop(self.lstm(inputs)[0][:, -1]))


class Gpt(nn.Module):
    """Logits for each token, or the hidden states before the head."""

    def __init__(self, *, has_logits):
        super().__init__()
        self.embed, self.head, self.has_logits = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS), has_logits
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True) for _ in range(2)
        )

    def forward(self, tokens):
        hidden = self.embed(tokens)
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask)
        return self.head(hidden) if self.has_logits else hidden


def made(name, features):
    torch.manual_seed(1)
    if name == "mlp":
        model = nn.Sequential(nn.Linear(6, WIDTH), *(Residual(WIDTH) for _ in range(2)), nn.Linear(WIDTH, CLASSES))
    elif name == "convolutional":
        block = [nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2)]
        model = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), *block, nn.Flatten(), nn.Linear(64, CLASSES))
    elif name == "lstm":
        model = Recurrent()
    else:
        model = Gpt(has_logits="chunked loss" not in features)
    return model if "scaler" in features else model.double()


def data(name, features):
    """Return the samples of one epoch. Every sample is another; those of text have labels of unlike number."""
    torch.manual_seed(2)
    count, kind = WINDOWS * TARGET, torch.float32 if "scaler" in features else torch.float64
    shape = {"mlp": (6,), "convolutional": (1, 6, 6), "lstm": (LENGTH, 2)}.get(name)
    if shape is None:
        numbers = torch.randperm(WORDS**LENGTH)[:count]
        inputs = torch.stack([numbers // WORDS**place % WORDS for place in range(LENGTH)], 1)
        ignored = torch.arange(LENGTH) >= torch.randint(1, LENGTH + 1, (count, 1))
        targets = inputs.roll(-1, 1).masked_fill(ignored, -100)
    else:
        inputs, targets = torch.randn(count, *shape, dtype=kind), torch.randint(0, CLASSES, (count,))
    return torch.utils.data.TensorDataset(inputs, targets)


# --- losses -----------------------------------------------------------------------------------------------------------


def flat(outputs, targets):
    return outputs.float().flatten(0, -2) if outputs.dtype is torch.half else outputs.flatten(0, -2), targets.flatten()


def entropy(outputs, targets):
    return functional.cross_entropy(*flat(outputs, targets))


def entropy_pair(outputs, targets):
    return functional.cross_entropy(*flat(outputs, targets), reduction="sum"), (targets != -100).sum()


def contrast(outputs, targets):
    vectors = functional.normalize(outputs.flatten(1).to(torch.promote_types(outputs.dtype, torch.float32)))
    return functional.cross_entropy(5.0 * vectors @ vectors.T, torch.arange(len(vectors)))


def contrast_pair(outputs, targets):
    return contrast(outputs, targets), 1.0


def energy(outputs, targets):
    return outputs.square().mean()


def energy_pair(outputs, targets):
    return outputs.square().sum(), outputs.numel()


def losses_of(features):
    one, other = (entropy_pair, energy_pair) if "pair" in features else (entropy, energy)
    if "chunked loss" in features:
        one = entropy
    elif "loss_scope" in features:
        one = contrast_pair if "pair" in features else contrast
    return [one, other] if "several losses" in features else [one]


class Of:
    def __init__(self, loss):
        self.loss = loss

    def __call__(self, model, batch):
        return self.loss(model(batch[0]), batch[1])


class OwnSplit:
    """Batches are pairs, as they are without it."""

    def count(self, batch):
        return len(batch[0])

    def cut(self, batch, sizes):
        return list(zip(*(tensor.split(list(sizes)) for tensor in batch), strict=True))

    def join(self, batches):
        return tuple(torch.cat(tensors) for tensors in zip(*batches, strict=True))


# --- what is recorded -------------------------------------------------------------------------------------------------


@dataclass
class Recorded(autoaccum.Callback):
    """The forward passes of a training, by window."""

    # For each update, the inputs and the random state of each pass from which it was made.
    windows: list = field(default_factory=list)
    losses: list = field(default_factory=list)  # what the reports say
    skipped: list = field(default_factory=list)  # whether the scaler skipped each update
    most: int | None = None  # samples of which any pass runs out of memory where it has more
    failed: int = 0
    passes_each: int = 1  # how often each micro-batch runs for an update

    def __post_init__(self):
        self.passes = []

    def watch(self, model):
        model.register_forward_pre_hook(self._note)

    def _note(self, model, inputs):
        if self.most is not None and len(inputs[0]) > self.most:
            self.failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB. (injected)")
        drops = [module.training for module in model.modules() if isinstance(module, nn.Dropout)]
        if not (model.training and torch.is_grad_enabled() and all(drops)):
            return
        self.passes.append((inputs[0].clone(), torch.get_rng_state()))

    def on_oom(self, event, *, step):
        self.passes = []

    def on_step(self, report, *, epoch):
        # A window may begin again with all checks, and one of a window loss has further passes: the last ones count.
        kept, counts = [], Counter()
        for inputs, random_state in reversed(self.passes):
            counts[key_of(inputs)] += 1
            if counts[key_of(inputs)] <= self.passes_each:
                kept.append((inputs, random_state))
        self.windows.append(kept[::-1])
        self.losses.append(report.loss)
        self.skipped.append(report.skipped)
        self.passes = []


def optimizers_of(model, features):
    if "optimizers" not in features:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    # Where a gradient is 0 but for rounding, Adam makes a whole step of the rounding of fp16.
    second = torch.optim.SGD(others, lr=1e-2) if "scaler" in features else torch.optim.AdamW(others, lr=1e-2)
    return [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), second]


def options_of(name, model, features):
    chosen = {"target_batch": TARGET, "micro_batch": 5, "precision": "fp32", "device": "cpu", "progress": False}
    losses = losses_of(features)
    if "chunked loss" in features:
        losses[0] = autoaccum.ChunkedLoss(model.head)
    chosen["loss"] = [Of(loss) for loss in losses] if len(losses) > 1 else losses[0]
    if "target_tokens" in features:
        chosen |= {"target_batch": None, "target_tokens": TOKENS.get(name, 40)}
    if saved := [word for word in ("checkpoint", "offload") if word in features]:
        chosen |= {"save_memory": saved, "device": autoaccum.Simulated("1GiB")}
    given = {
        "noise_scale": {"noise_scale": 1},
        "loss_scope": {"loss_scope": "window"},
        "batchnorm": {"batchnorm": "rescale"},
        "clipping": {"clip_grad_norm": 0.05},
        "scaler": {"precision": "fp16"},
        "split": {"split": OwnSplit()},
        "ranks": {"shard_data": True},
    }
    for feature in features:
        chosen |= given.get(feature, {})
    return chosen


@dataclass
class Outcome:
    error: str  # what refused it, in words; "" if it trained
    state: dict  # the model's state in the end
    recorded: Recorded  # its passes
    evaluation: float | None = None  # the loss of the last evaluation


def trained(name, features, folder):
    """Train as `fit` does, on this process or as one of several ranks."""
    recorded = Recorded(most=3 if "out of memory" in features else None, passes_each=len(losses_of(features)))
    loader = torch.utils.data.DataLoader(data(name, features), batch_size=BATCH)
    calls = (2, None) if "resume" in features else (None,)
    result = None
    for max_steps in calls:
        model = made(name, features)
        recorded.watch(model)
        options = options_of(name, model, features)
        if "resume" in features:
            options["checkpoint"] = folder
        if "evaluation" in features:
            options["val_loader"] = loader
        callbacks = [recorded, autoaccum.Callback()] if "callbacks" in features else [recorded]
        torch.manual_seed(3)
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                result = autoaccum.fit(
                    model, loader, optimizer=optimizers_of(model, features), epochs=1, max_steps=max_steps,
                    callbacks=callbacks, **options,
                )  # fmt: skip
        except autoaccum.errors.AutoaccumError as error:
            return Outcome(f"{type(error).__name__}: {error}", {}, recorded)
    evaluation = result.evaluations[-1].loss if "evaluation" in features else None
    return Outcome("", {key: value.detach().clone() for key, value in model.state_dict().items()}, recorded, evaluation)


def on_rank(rank, size, name, features, folder):
    return trained(name, features, folder)


def outcomes_of(rank_pool, name, features, folder):
    """Train on this process, or on two of a pool; return what each left."""
    if "ranks" in features:
        return rank_pool.run("support.training.feature_pairs:on_rank", name, features, folder, size=2)
    return [trained(name, features, folder)]


# --- the plain loop ---------------------------------------------------------------------------------------------------


def plain(name, features, recorded, skipped):
    """Train on the passes of all ranks, but for updates that were skipped; return the model and each window's loss."""
    model, losses = made(name, features), []
    optimizers = optimizers_of(model, features)
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    functions = losses_of(features)
    targets_of = {key_of(row): target for row, target in data(name, features)}
    momenta = [(layer, layer.momentum) for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    for passes, is_skipped in zip(recorded, skipped, strict=True):
        samples = sum(len(inputs) for inputs, _ in passes) // len(functions)
        outputs, targets = [[] for _ in functions], [[] for _ in functions]
        for number, (inputs, random_state) in enumerate(passes):
            if "batchnorm" in features:
                for layer, momentum in momenta:
                    layer.momentum = 1 - (1 - momentum) ** (len(inputs) / samples)
            torch.set_rng_state(random_state)
            with torch.autocast("cpu", torch.float16, enabled="scaler" in features):
                output = model(inputs)
                of = number % len(functions)
                outputs[of].append(model.head(output) if "chunked loss" in features and of == 0 else output)
            targets[of] += [targets_of[key_of(row)] for row in inputs]
        total = 0.0
        with torch.autocast("cpu", torch.float16, enabled="scaler" in features):
            for function, out, aims in zip(functions, outputs, targets, strict=True):
                value = function(torch.cat(out), torch.stack(aims))
                total = total + (value[0] / value[1] if isinstance(value, tuple) else value)
        for optimizer in optimizers:
            optimizer.zero_grad()
        total.backward()
        if "clipping" in features:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        for optimizer in [] if is_skipped else optimizers:
            optimizer.step()
        losses.append(total.item())
    return model, losses


def key_of(row):
    return row.numpy().tobytes()


def judged(name, features, outcomes):
    """Return what differs from the plain loop, in words; `outcomes` has one for each rank."""
    if len({outcome.error for outcome in outcomes}) > 1:
        return [f"ranks end apart: {[outcome.error for outcome in outcomes]}"]
    if outcomes[0].error:
        return []
    recorded = [[one for part in parts for one in part] for parts in _by_window(outcomes)]
    functions = losses_of(features)
    seen = sorted(key_of(row) for passes in recorded for inputs, _ in passes for row in inputs)
    wanted = sorted(key_of(row) for row, _ in data(name, features) for _ in functions)
    wrong = [] if seen == wanted else [f"{len(seen)} samples were used, not each of {len(wanted)} once"]
    if "out of memory" in features and not any(one.recorded.failed for one in outcomes):
        wrong.append("memory did not run out")
    if wrong:
        return wrong
    model, losses = plain(name, features, recorded, outcomes[0].recorded.skipped)
    off = 3e-2 if "scaler" in features else 1e-10
    start, end = made(name, features).state_dict(), model.state_dict()
    names = dict(model.named_parameters()) if len(outcomes) > 1 else end
    for rank, outcome in enumerate(outcomes):
        for key in names:
            moved = (end[key] - start[key]).double().norm() + 1e-6
            difference = (outcome.state[key] - end[key]).double().norm() / moved
            if not difference <= off:
                wrong.append(f"rank {rank}: {key} is off by {difference:.1e} of the way it moved")
        for step, (reported, loss) in enumerate(zip(outcome.recorded.losses, losses, strict=True), 1):
            if not abs(reported - loss) <= off * max(1.0, abs(loss)):
                wrong.append(f"rank {rank}: step {step} reports a loss of {reported:.6f}, not {loss:.6f}")
    return wrong


def _by_window(outcomes):
    return zip(*(outcome.recorded.windows for outcome in outcomes), strict=True)
