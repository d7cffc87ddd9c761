"""Traces the training runs of published/xmem.csv on fake tensors of a GPU: their models and their loops.

For a line of the file it returns the timeline of its first iterations. The loops differ from `fit`: the model's output
is kept until the next iteration has its own, and gradients are freed before each forward pass.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autoaccum._estimate.allocation_trace import Category
from autoaccum._estimate.cuda_allocator import CachingAllocator, replay
from autoaccum._estimate.cuda_dispatch import CudaCalls, without_driver
from autoaccum._estimate.cuda_kernels import workspace
from autoaccum._estimate.estimate import take_lists
from autoaccum._estimate.fake import FakeCopies, ValuesAssumed
from autoaccum._estimate.fake_backward import loosened
from autoaccum._estimate.tracer import Ledger

GPU = torch.device("cuda", 0)

PIXELS, TOKENS = 86, 128
IMAGE_ITERATIONS, TEXT_ITERATIONS = 4, 3


def _small_net(kind, last_channel):
    from torchvision.models import mobilenetv3  # noqa: PLC0415 - large

    setting, _ = mobilenetv3._mobilenet_v3_conf(kind)
    return mobilenetv3.MobileNetV3(setting, last_channel=last_channel, num_classes=10)


def _torchvision(name, **options):
    from torchvision import models  # noqa: PLC0415 - large

    return getattr(models, name)(**options)


# By their names in the file.
IMAGE_MODELS = {
    "VGG16": functools.partial(_torchvision, "vgg16"),
    "VGG19": functools.partial(_torchvision, "vgg19"),
    "ResNet101": functools.partial(_torchvision, "resnet101"),
    "ResNet152": functools.partial(_torchvision, "resnet152"),
    "MobileNetV2": functools.partial(_torchvision, "mobilenet_v2"),
    "MobeNetV3Small": functools.partial(_small_net, "mobilenet_v3_small", 1024),
    "MobeNetV3Large": functools.partial(_small_net, "mobilenet_v3_large", 1280),
    "MnasNet": functools.partial(_torchvision, "MNASNet", alpha=1.0, num_classes=10),
    "ConvNeXtTiny": functools.partial(_torchvision, "convnext_tiny"),
    "ConvNeXtBase": functools.partial(_torchvision, "convnext_base"),
    "RegNetX400MF": functools.partial(_torchvision, "regnet_x_400mf"),
    "RegNetY400MF": functools.partial(_torchvision, "regnet_y_400mf"),
}
READ_WHEN_MADE = ("RegNetX400MF", "RegNetY400MF")

_GPT2_SIZES = {"n_embd": 768, "n_head": 12}
_WITHOUT_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
_DECODER = {"head_dim": 128, "num_key_value_heads": 8}
# Configurations as published, because nothing is downloaded.
TEXT_MODELS = {
    "openai-community/gpt2": ("GPT2Config", _GPT2_SIZES | {"n_layer": 12}),
    "distilbert/distilgpt2": ("GPT2Config", _GPT2_SIZES | {"n_layer": 6}),
    "cerebras/Cerebras-GPT-111M": (
        "GPT2Config",
        _GPT2_SIZES
        | _WITHOUT_DROPOUT
        | {"n_layer": 10, "n_inner": 3072, "n_positions": 2048, "activation_function": "gelu"},
    ),
    "EleutherAI/gpt-neo-125M": (
        "GPTNeoConfig",
        {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "attention_types": [[["global", "local"], 6]]},
    ),
    "facebook/opt-125m": ("OPTConfig", {}),
    "facebook/opt-350m": (
        "OPTConfig",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "ffn_dim": 4096,
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
        },
    ),
    "T5-small": ("T5Config", {"decoder_start_token_id": 0}),
    "t5-base": (
        "T5Config",
        {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "decoder_start_token_id": 0},
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": (
        "Qwen2Config",
        {
            "vocab_size": 151936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
        },
    ),
    "google/gemma-2-2b-it": ("Gemma2Config", {}),
    "meta-llama/Llama-3.2-3B-Instruct": (
        "LlamaConfig",
        _DECODER
        | {
            "vocab_size": 128256,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 28,
            "num_attention_heads": 24,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen/Qwen3-4B": (
        "Qwen3Config",
        _DECODER
        | {
            "vocab_size": 151936,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "tie_word_embeddings": True,
        },
    ),
}


def timeline_of(model, optimizer, batch, first_tokens=TOKENS):
    """Trace the iterations of one run, by the file's names; the first batch of text may be shorter."""
    with torch.device("cpu" if model in READ_WHEN_MADE else "meta"):
        made = IMAGE_MODELS[model]() if model in IMAGE_MODELS else _language_model(model)
    with _read_as_padded(), on_fake_gpu(made, batch) as (fake, timeline):
        loop = _images if model in IMAGE_MODELS else _text
        loop(fake, _optimizer(optimizer, fake.parameters()), batch, first_tokens)
    return timeline


def _images(model, optimizer, batch, _first_tokens):
    for _ in range(IMAGE_ITERATIONS):
        optimizer.zero_grad()
        images = torch.empty(batch, 3, PIXELS, PIXELS, device=GPU)
        labels = torch.zeros(batch, dtype=torch.long, device=GPU)
        outputs = model(images)
        loss = loosened(nn.functional.cross_entropy(outputs, labels))
        outputs = outputs.detach()
        loss.backward()
        del images, labels  # the loop rebinds these names before the next batch is on the GPU
        step(optimizer)


def _text(model, optimizer, batch, first_tokens):
    held = []
    for tokens in (first_tokens, *[TOKENS] * (TEXT_ITERATIONS - 1)):
        optimizer.zero_grad()
        names = ("input_ids", "attention_mask", "labels")
        outputs = model(**{name: torch.zeros(batch, tokens, dtype=torch.long, device=GPU) for name in names})
        # The loop keeps the output, including the cache of keys and values, but not the graph, which backward frees.
        held[:] = [tensor.detach() for tensor in _tensors(outputs, set())]
        loss = loosened(outputs.loss)
        del outputs
        loss.backward()
        step(optimizer)


def _optimizer(name, parameters):
    if name == "Adafactor":
        from transformers.optimization import Adafactor  # noqa: PLC0415 - large

        return Adafactor(parameters, lr=1e-3, relative_step=False)
    made = getattr(torch.optim, name)(parameters, lr=1e-3)
    take_lists(made)
    return made


def _language_model(name):
    import transformers  # noqa: PLC0415 - large

    configuration, options = TEXT_MODELS[name]
    kind = transformers.AutoModelForSeq2SeqLM if configuration == "T5Config" else transformers.AutoModelForCausalLM
    return kind.from_config(getattr(transformers, configuration)(**options))


def _tensors(thing, seen):
    """Yield the tensors of a language model's output, however nested."""
    if isinstance(thing, torch.Tensor):
        yield thing
        return
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, dict):
        parts = thing.values()
    elif isinstance(thing, list | tuple):
        parts = thing
    else:
        parts = vars(thing).values() if hasattr(thing, "__dict__") and not isinstance(thing, type) else ()
    for part in parts:
        yield from _tensors(part, seen)


@contextmanager
def _read_as_padded():
    """Supply the values that older versions of transformers read from tensors.

    Whether a mask has padding: it does, because lines of text differ in length. Whether OPT drops a layer: the
    probability is 0.
    """
    drawn = torch.rand
    with mock.patch.object(torch, "rand", lambda *size, **options: 1.0 if size == ([],) else drawn(*size, **options)):
        try:
            from transformers.modeling_attn_mask_utils import AttentionMaskConverter  # noqa: PLC0415 - not in every one
        except ImportError:
            yield
            return
        with mock.patch.object(
            AttentionMaskConverter, "_ignore_causal_mask_sdpa", staticmethod(lambda *_, **__: False)
        ):
            yield


@contextmanager
def on_fake_gpu(model, batch):
    """Yield the model on a fake GPU, and the timeline that records what is done with it inside the block."""
    with FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False):
        fake = FakeCopies(GPU).copied(model.train())
        ledger = Ledger(batch, GPU.type, functools.partial(workspace, tensor_float=True))
        ledger.hold(fake.parameters(), Category.PARAMETERS)
        ledger.hold(fake.buffers(), Category.BUFFERS)
        ledger.enter("training")
        with without_driver(), CudaCalls(), ledger:
            yield fake, ledger.timeline


def step(optimizer):
    with ValuesAssumed():
        optimizer.step()


def served(timeline, *, cublas=(), capacity_bytes=None):
    """Return PyTorch's allocator after it has served a timeline; raises if the capacity is too small.

    Args:
        timeline: The timeline.
        cublas: cuBLAS's workspaces, allocated first: bytes for each handle.
        capacity_bytes: The memory of the GPU; None for unlimited.
    """
    allocator = CachingAllocator(capacity_bytes)
    for size_bytes in cublas:
        allocator.allocate(size_bytes)
    replay(allocator, timeline, timeline.events, {})
    return allocator
