"""Makes every architecture of transformers and torchvision in a small configuration, with a batch that it takes.

Most take the numbers in `SMALL`. `NEEDED` has what else a configuration needs so that the model can be made, and
`BATCHES` the batches of models that take another than their group's.
"""

from __future__ import annotations

SAMPLES, LENGTH, IMAGE, PATCH, CLASSES = 4, 32, 64, 16, 2

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
    | dict.fromkeys(("head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim"), 16)
    | {"image_size": IMAGE, "patch_size": PATCH, "tie_word_embeddings": False}
)
# Numbers that have no value by default, and need one.
UNSET = ("head_dim", "num_experts_per_tok", "n_group", "topk_group")
# What the configuration around a backbone says of it.
OF_BACKBONES = ("_out_features", "_out_indices", "apply_layernorm", "reshape_hidden_states")
# Made so, one after another, until one goes through.
CONFIGURATIONS = {
    "narrow": SMALL,
    "narrow, twelve layers": SMALL | dict.fromkeys(LAYERS, 12),
    "shallow": LAYERS | {"image_size": IMAGE},
    "its own": {},
}
# By the configuration's class, or the model's.
NEEDED = {
    # Hybrids of which two layers are of each kind, and numbers that a layer needs and the default leaves out.
    "BambaConfig": {"attn_layer_indices": [1]},
    "GraniteMoeHybridConfig": {"layer_types": ["linear_attention", "full_attention"]},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Qwen4ExpTextConfig": {
        "layer_types": ["linear_attention", "indexed_attention"],
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "NemotronConfig": {"num_key_value_heads": 4},
    "Dots1Config": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "Gemma3nTextConfig": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 512},
    "Gemma4TextConfig": {"vocab_size_per_layer_input": 512},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "Mamba2Config": {"num_heads": 8},
    "ZambaConfig": {"layers_block_type": ["linear_attention", "hybrid"]},
    "Zamba2Config": {"layers_block_type": ["linear_attention", "hybrid"]},
    "BltConfig": {"use_cache": False, "encoder_hash_byte_group_vocab": 512},
    "ZayaConfig": {"num_experts_per_tok": 1},
    "ProphetNetConfig": {"num_encoder_layers": 2, "num_decoder_layers": 2},
    # Positions.
    "CohereCompassTextConfig": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
        }
    },
    "DbrxAttentionConfig": {"rope_theta": 1e4, "clip_qkv": 8},
    "ReformerConfig": {"attn_layers": ["local", "lsh"], "axial_pos_shape": [4, 8], "axial_pos_embds_dim": [32, 32]},
    "PerceiverConfig": {
        "max_position_embeddings": LENGTH,
        "num_latents": 16,
        "d_latents": 64,
        "num_self_attends_per_block": 2,
        "num_cross_attention_heads": 1,
    },
    "XmodConfig": {"default_language": "en_XX"},
    # Where backbones end, and what their heads are made of.
    "BeitForSemanticSegmentation": {"out_indices": [3, 5, 7, 11]},
    "Sapiens2HeadConfig": {"upsample_out_channels": [32, 32], "conv_out_channels": [32]},
    # The two tokens whose scores are compared.
    "ShieldGemma2Config": {"yes_token_index": 5, "no_token_index": 6},
    # A draft model has neither its own embeddings for each layer nor its own keys and values.
    "Gemma4AssistantConfig": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 2,
            "num_hidden_layers": 2,
        }
    },
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


def shrunk(kind, numbers, needed, around=None):
    """Return a configuration with smaller numbers, also in those inside.

    Args:
        kind: Its class.
        numbers: The numbers, by their names.
        needed: What it needs besides.
        around: What the configuration around it says of it.
    """
    from transformers import PreTrainedConfig  # noqa: PLC0415 - it is large

    needed = NEEDED.get(kind.__name__, {}) | needed
    try:
        plain = kind()
    except Exception:  # noqa: BLE001 - some are made only with what they need
        plain = kind(**needed)
    given = {name: number for name, number in numbers.items() if takes(plain, name)}
    if "vocab_size" in numbers:
        given |= {name: number for name, number in TOKENS.items() if hasattr(plain, name)}
    for name, value in vars(plain).items():
        if isinstance(value, PreTrainedConfig):
            inside = {part: it for part, it in needed.get(name, {}).items() if part != "model_type"}
            given[name] = shrunk(type(value), numbers, inside, value)
        elif numbers and name == "depths" and isinstance(value, list | tuple):
            given[name] = [1] * len(value)
    if around is not None:
        ends = {name.lstrip("_"): vars(around)[name] for name in OF_BACKBONES if name in vars(around)}
        given |= {name: value for name, value in ends.items() if value != getattr(plain, name)}
    made = {name for name, value in given.items() if isinstance(value, PreTrainedConfig)}
    return kind(**given | {name: value for name, value in needed.items() if name not in made})


def takes(plain, name):
    """Whether a configuration has a number of that name that can be set."""
    if isinstance(getattr(type(plain), name, None), property):
        return False
    value = vars(plain).get(plain.attribute_map.get(name, name), ...)
    return isinstance(value, int) or (name in UNSET and value is None)


def inputs_for(group, config):
    """Return the inputs of a group's models, with labels."""
    import torch  # noqa: PLC0415 - as above

    if group in ("image", "segmentation"):
        size = getattr(getattr(config, "vision_config", config), "image_size", None) or 224
        high, wide = size if isinstance(size, list | tuple) else (size, size)
        pixels = torch.zeros(SAMPLES, getattr(config, "num_channels", 3), high, wide)
        shape = (SAMPLES, high, wide) if group == "segmentation" else (SAMPLES,)
        return {"pixel_values": pixels, "labels": torch.zeros(shape, dtype=torch.long)}
    tokens = torch.randint(3, 100, (SAMPLES, LENGTH))
    return {"input_ids": tokens, "labels": tokens.clone()}


def tokens_for_classes(_config):
    import torch  # noqa: PLC0415 - as above

    return {"input_ids": torch.randint(3, 100, (SAMPLES, LENGTH)), "labels": torch.zeros(SAMPLES, dtype=torch.long)}


def codes(config):
    import torch  # noqa: PLC0415 - as above

    found = torch.randint(3, 100, (SAMPLES, config.num_codebooks, LENGTH))
    return {"input_ids": found, "labels": found.transpose(1, 2).contiguous()}


def captions(config):
    import torch  # noqa: PLC0415 - as above

    size = config.vision_config.image_size
    return inputs_for("causal", config) | {"pixel_values": torch.zeros(SAMPLES, 3, size, size)}


def patches(config):
    import torch  # noqa: PLC0415 - as above

    rows = int(config.vision_config.num_patches**0.5)
    return {
        "pixel_values": torch.zeros(SAMPLES, rows * rows, 3 * config.vision_config.patch_size**2),
        "pixel_attention_mask": torch.ones(SAMPLES, rows * rows),
        "spatial_shapes": torch.full((SAMPLES, 2), rows),
        "labels": torch.zeros(SAMPLES, dtype=torch.long),
    }


def speech(config):
    import torch  # noqa: PLC0415 - as above

    frames = LENGTH * config.audio_length_per_tok
    return inputs_for("causal", config) | {
        "input_features": torch.zeros(SAMPLES, config.audio_config.num_mel_bins, frames)
    }


def policies(config):
    """Return questions without their images."""
    return tokens_for_classes(config) | {"token_type_ids": tokens_for_classes(config)["input_ids"] * 0}


def judged(model, batch):
    """Return the loss of a model that has none itself: the cross entropy of what it gives."""
    from torch.nn import functional  # noqa: PLC0415 - as above

    outputs = model(**{name: value for name, value in batch.items() if name != "labels"})
    scores = outputs.logits if "logits" in outputs else outputs.last_hidden_state
    return functional.cross_entropy(scores.flatten(0, -2), batch["labels"].flatten())


def of_codes(model, batch):
    return model(input_ids=batch["input_ids"].flatten(0, 1), labels=batch["labels"]).loss


# Inputs, and where a model gives no loss, what makes one.
BATCHES = {
    "GitForCausalLM": (captions, None),
    "MusicgenForCausalLM": (codes, of_codes),
    "MusicgenMelodyForCausalLM": (codes, of_codes),
    "VoxtralRealtimeForConditionalGeneration": (speech, None),
    "ImageGPTForImageClassification": (tokens_for_classes, None),
    "ShieldGemma2ForImageClassification": (policies, judged),
    "Siglip2ForImageClassification": (patches, None),
    "DeiTForImageClassificationWithTeacher": (None, judged),
    "LevitForImageClassificationWithTeacher": (None, judged),
    "PPLCNetForImageClassification": (None, judged),
}


def of_transformers(group, name, numbers):
    """Return a function that makes the model, a batch, and options of the prediction."""
    import transformers  # noqa: PLC0415 - as above

    kind = getattr(transformers, name)
    config = shrunk(kind.config_class, numbers, NEEDED.get(name, {}))
    if group == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    if group == "sequence to sequence" and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    inputs, forward = BATCHES.get(name, (None, None))
    batch = inputs(config) if inputs else inputs_for(group, config)
    return lambda: kind(config).train(), batch, {"forward": forward} if forward else {}


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
