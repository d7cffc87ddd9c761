"""Predicts a training step of every architecture of transformers and torchvision for a card, on a machine without one.

    python benchmarks/architectures.py [--only mixtral resnet18] [--again not] [--out FILE] [--page docs/FILE.md]

Each model is made in a small configuration on the meta device and predicted in a process of its own, under a limit of
memory and of time. The answer is how it went: on fake tensors; by a real step, and why; or not at all, and why. An
architecture that no small configuration could be made for is told apart: there, the step fails on real tensors too, or
the model cannot be made. What is in FILE already is not asked again, so that an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import importlib.metadata
import json
import re
import resource
import sys
import warnings
from pathlib import Path

import isolated
from bench import keep

CARD = "h100-80gb"
SAMPLES, LENGTH, IMAGE = 4, 32, 64
LIMIT_BYTES, LIMIT_S, PROCESSES = 8 * 2**30, 150, 2
PRELOADED = [
    "torch._dynamo",
    "torchvision.models",
    "transformers.models.llama.modeling_llama",
    "transformers.models.vit.modeling_vit",
    "transformers.loss.loss_utils",
    "autoaccum._estimate.estimate",
]

# How it went, in the order of the tables.
FAKES, REAL, NOT, UNMADE = "on fakes", "by a real step", "not", "no small configuration"

# By the task that transformers sorts its classes by.
TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "encoder": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "sequence to sequence": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "segmentation": "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
}
LAYERS = dict.fromkeys(
    (
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "encoder_layers",
        "decoder_layers",
        "num_encoder_layers",
        "num_decoder_layers",
    ),
    2,
)
TOKENS = {"vocab_size": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
SMALL = (
    LAYERS
    | TOKENS
    | dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "d_embed", "word_embed_proj_dim", "embed_dim"), 64)
    | dict.fromkeys(("embedding_size", "decoder_hidden_size", "rnn_hidden_size", "lru_width"), 64)
    | dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4)
    | dict.fromkeys(("encoder_attention_heads", "num_key_value_heads", "decoder_num_attention_heads"), 4)
    | dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "d_ff"), 128)
    | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
    | dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2)
    | {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "n_group": 1, "topk_group": 1}
    | {"head_dim": 16, "d_kv": 16, "image_size": IMAGE, "patch_size": 16, "tie_word_embeddings": False}
)
# Numbers that have no value by default, and need one.
UNSET = ("head_dim", "num_experts_per_tok", "n_group", "topk_group")
# Made so, one after another, until one goes through.
CONFIGURATIONS = {
    "narrow": SMALL,
    "narrow, eight layers": SMALL | dict.fromkeys(LAYERS, 8),
    "shallow": LAYERS | {"image_size": IMAGE},
    "its own": {},
}


def names():
    """Return (library, group, architecture, class) of all, in a fixed order."""
    from torchvision import models  # noqa: PLC0415 - as the children do
    from transformers.models.auto import modeling_auto  # noqa: PLC0415 - as above

    found = {}
    for group, table in TASKS.items():
        for architecture, classes in getattr(modeling_auto, table).items():
            for name in [classes] if isinstance(classes, str) else classes:
                found.setdefault(name, ("transformers", group, architecture, name))
    for name in models.list_models():
        if not name.startswith("quantized_"):
            group = models.get_model_builder(name).__module__.split(".")[2]
            group = group if group in ("detection", "segmentation", "video", "optical_flow") else "image"
            found[f"torchvision {name}"] = ("torchvision", group, name, models.get_model_builder(name).__name__)
    return list(found.values())


def shrunk(kind, numbers):
    """Return a configuration with smaller numbers, also in those inside."""
    from transformers import PreTrainedConfig  # noqa: PLC0415 - it is large

    plain = kind()
    given = {
        name: number
        for name, number in numbers.items()
        if isinstance(getattr(plain, name, None), int) or (name in UNSET and getattr(plain, name, 0) is None)
    }
    if "vocab_size" in numbers:
        given |= {name: number for name, number in TOKENS.items() if hasattr(plain, name)}
    for name, value in vars(plain).items():
        if isinstance(value, PreTrainedConfig):
            given[name] = shrunk(type(value), numbers)
        elif numbers and name == "depths" and isinstance(value, list | tuple):
            given[name] = [1] * len(value)
    return kind(**given)


def batch_for(group, config):
    import torch  # noqa: PLC0415 - as above

    if group in ("image", "segmentation"):
        size = getattr(config, "image_size", None) or 224
        high, wide = size if isinstance(size, list | tuple) else (size, size)
        pixels = torch.zeros(SAMPLES, getattr(config, "num_channels", 3), high, wide)
        shape = (SAMPLES, high, wide) if group == "segmentation" else (SAMPLES,)
        return {"pixel_values": pixels, "labels": torch.zeros(shape, dtype=torch.long)}
    tokens = torch.randint(3, 100, (SAMPLES, LENGTH))
    return {"input_ids": tokens, "labels": tokens.clone()}


def of_transformers(group, name, numbers):
    """Return a function that makes the model, and a batch."""
    import transformers  # noqa: PLC0415 - as above

    kind = getattr(transformers, name)
    config = shrunk(kind.config_class, numbers)
    if group == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    if group == "sequence to sequence" and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    return lambda: kind(config).train(), batch_for(group, config), {}


def of_torchvision(group, name):
    import torch  # noqa: PLC0415 - as above
    from torch.nn import functional  # noqa: PLC0415 - as above
    from torchvision import models  # noqa: PLC0415 - as above

    without = {"weights": None} | ({"weights_backbone": None} if group in ("detection", "segmentation") else {})
    if group == "detection":
        # Images of one size with a box each, so that a tensor holds them.
        targets = {
            "boxes": torch.tensor([8.0, 8.0, 64.0, 64.0]).repeat(SAMPLES, 1, 1),
            "labels": torch.ones(SAMPLES, 1, dtype=torch.long),
            "masks": torch.zeros(SAMPLES, 1, 320, 320, dtype=torch.uint8),
            "keypoints": torch.ones(SAMPLES, 1, 17, 3),
        }

        def losses(model, batch):
            images, targets = batch
            each = [dict(zip(targets, values, strict=True)) for values in zip(*targets.values(), strict=True)]
            return sum(model(list(images), each).values())

        return (
            lambda: models.get_model(name, **without),
            (torch.rand(SAMPLES, 3, 320, 320), targets),
            {"forward": losses},
        )
    if group == "segmentation":
        batch = torch.rand(SAMPLES, 3, 128, 128), torch.zeros(SAMPLES, 128, 128, dtype=torch.long)
        loss = {"loss": lambda outputs, labels: functional.cross_entropy(outputs["out"], labels)}
        return lambda: models.get_model(name, **without), batch, loss
    if group == "optical_flow":
        batch = torch.rand(SAMPLES, 3, 128, 128), torch.rand(SAMPLES, 3, 128, 128)
        flow = {"forward": lambda model, batch: sum(one.abs().mean() for one in model(*batch))}
        return lambda: models.get_model(name, **without), batch, flow
    labels = torch.zeros(SAMPLES, dtype=torch.long)
    if group == "video":
        frames = 16 if name.startswith(("mvit", "swin3d", "s3d")) else 8
        batch, loss = (torch.rand(SAMPLES, 3, frames, 224, 224), labels), {}
    else:
        pixels = 299 if name == "inception_v3" else 224
        batch, loss = (torch.rand(SAMPLES, 3, pixels, pixels), labels), {}
    if name in ("googlenet", "inception_v3"):
        without |= {"init_weights": False}
        loss = {"loss": lambda outputs, labels: functional.cross_entropy(outputs.logits, labels)}
    return lambda: models.get_model(name, **without), batch, loss


def said(error):
    text = re.sub(r"\s+", " ", str(error)).strip() or repr(error)
    return f"{type(error).__name__}: {text[:300]}"


def runs_for_real(make, batch, options):
    """Whether the model makes a step on real tensors of the CPU, and if not, why."""
    from autoaccum._estimate.estimate import trace_step  # noqa: PLC0415 - as above

    def here(model, batch):
        # Its first value makes the trace go on with real tensors.
        next(value for value in model.parameters()).flatten()[0].item()
        return options["forward"](model, batch) if "forward" in options else model(**batch)

    try:
        trace_step(make, batch, kind="cpu", sizes=[2], forward=here, precision="bf16")
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        return said(error)
    return None


def ask(_connection, *one):
    """Predict one model in a process of its own."""
    import torch  # noqa: PLC0415 - as above

    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return predicted(*one)


def predicted(library, group, architecture, name):
    """Return how a model went, and why."""
    from autoaccum._estimate.estimate import estimate_step  # noqa: PLC0415 - as above
    from autoaccum._estimate.gpus import card_named  # noqa: PLC0415 - as above

    failed = {}
    ways = CONFIGURATIONS if library == "transformers" else {"as it is": None}
    for way, numbers in ways.items():
        try:
            if library == "transformers":
                make, batch, options = of_transformers(group, name, numbers)
            else:
                make, batch, options = of_torchvision(group, architecture)
        except Exception as error:  # noqa: BLE001 - as above
            failed[way] = UNMADE, said(error)
            continue
        try:
            estimate = estimate_step(make, batch, card=card_named(CARD), precision="auto", sizes=[2], **options)
        except Exception as error:  # noqa: BLE001 - as above
            why = runs_for_real(make, batch, options) if way.startswith("narrow") else said(error)
            failed[way] = (NOT, said(error)) if why is None else (UNMADE, said(error))
            continue
        if estimate.real_step:
            return {"how": REAL, "why": estimate.notes[0].partition(": ")[2], "configuration": way}
        return {"how": FAKES, "peak_bytes": estimate.footprints[-1].peak_bytes, "configuration": way}
    # A step that fails on fakes only says most.
    way, (how, why) = next(((way, one) for way, one in failed.items() if one[0] == NOT), [*failed.items()][-1])
    return {"how": how if library == "transformers" else NOT, "why": why, "configuration": way}


def asked(one):
    _, answer, why = isolated.call(ask, *one, timeout_s=LIMIT_S)
    return dict(zip(("library", "group", "architecture", "class"), one, strict=True)) | (
        answer or {"how": NOT, "why": f"its process {why}"}
    )


def reason(row):
    """Return why, so that the same causes have the same words."""
    return re.sub(r"0x[0-9a-f]+|\d{3,}", "…", row.get("why", ""))


def markdown(rows):
    """Return how many went how, and which did not go through on fakes."""
    counts = collections.defaultdict(collections.Counter)
    for row in rows:
        counts[row["library"], row["group"]][row["how"]] += 1
    hows = (FAKES, REAL, NOT, UNMADE)
    lines = ["| | " + " | ".join(hows) + " |", "|---" * (len(hows) + 1) + "|"]
    for (library, group), found in counts.items():
        lines.append(f"| {library}, {group} | " + " | ".join(str(found[how]) for how in hows) + " |")
    total = collections.Counter(row["how"] for row in rows)
    lines.append("| all | " + " | ".join(str(total[how]) for how in hows) + " |")
    for how in hows[1:]:
        of = collections.defaultdict(list)
        for row in rows:
            if row["how"] == how:
                of[reason(row)].append(row["architecture"] if row["library"] == "torchvision" else row["class"])
        if of:
            lines += ["", f"| {how}: why | which |", "|---|---|"]
            for why, which in sorted(of.items(), key=lambda item: -len(item[1])):
                lines.append(f"| {why.replace('|', '/')} | {', '.join(sorted(which))} |")
    return "\n".join(lines)


def table(rows):
    lines = ["| architecture | class | how | why |", "|---|---|---|---|"]
    lines += [f"| {row['architecture']} | {row['class']} | {row['how']} | {reason(row)} |" for row in rows]
    return "\n".join(lines)


def write(page, text):
    began, ended = "<!-- architectures: begin -->", "<!-- architectures: end -->"
    before, _, rest = page.read_text().partition(began)
    page.write_text(f"{before}{began}\n{text}\n{ended}{rest.partition(ended)[2]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="architectures or classes")
    parser.add_argument("--again", nargs="*", help="ask again what went so, such as 'not'; all without a value")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--table", action="store_true", help="print all of it")
    options = parser.parse_args()
    every = names()
    chosen = [one for one in every if not options.only or set(options.only) & set(one[2:])]
    results = {
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "torchvision")},
        "card": CARD,
        "rows": [],
    }
    if options.out and options.out.exists():
        results["rows"] = json.loads(options.out.read_text())["rows"]
    known = {(row["library"], row["class"], row["architecture"]): row for row in results["rows"]}
    answers = dict(known)  # the former ones stay until there are others
    if options.again is not None:
        again = {(one[0], one[3], one[2]) for one in chosen}
        known = {
            key: row
            for key, row in known.items()
            if key not in again or (options.again and row["how"] not in options.again)
        }
    missing = [one for one in chosen if (one[0], one[3], one[2]) not in known]
    isolated.PRELOADED[:] = PRELOADED
    isolated.prepare()
    order = {(one[0], one[3], one[2]): number for number, one in enumerate(every)}
    with concurrent.futures.ThreadPoolExecutor(PROCESSES) as pool, contextlib.suppress(KeyboardInterrupt):
        for number, row in enumerate(pool.map(asked, missing), start=1):
            answers[row["library"], row["class"], row["architecture"]] = row
            results["rows"] = [answers[key] for key in sorted(answers, key=lambda key: order.get(key, len(order)))]
            keep(options.out, results)
            what = f"{row['architecture']} {row['class']}: {row['how']} {row.get('why', '')[:150]}"
            print(f"{number}/{len(missing)} {what}", file=sys.stderr, flush=True)
    rows = [
        row for row in results["rows"] if not options.only or set(options.only) & {row["class"], row["architecture"]}
    ]
    print(table(rows) if options.table else markdown(rows))
    if options.page:
        write(options.page, markdown(results["rows"]))


if __name__ == "__main__":
    main()
