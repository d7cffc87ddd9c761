"""Models of Transformers so small that a training of them takes no time, without Dropout."""

import torch

OF_BERT = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
WITHOUT_DROPOUT = {
    "GPT2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "Bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "ViT": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "T5": {"dropout_rate": 0.0},
    "Llama": {},
}
SIZES = {
    "GPT2": {"n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False},
    "Bert": OF_BERT,
    "ViT": OF_BERT,
    "T5": {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0},
    "Llama": {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "use_cache": False,
    },
}
LENGTH = {"GPT2": "n_positions", "Bert": "max_position_embeddings"}


def tiny(name, vocabulary, length, seed=0, **options):
    """A model by the name of its class, for sentences of up to `length` tokens of a vocabulary."""
    import transformers  # noqa: PLC0415 - slow

    family = next(family for family in SIZES if name.startswith(family))
    if family in LENGTH:
        options[LENGTH[family]] = length
    config = getattr(transformers, f"{family}Config")(
        vocab_size=vocabulary, **SIZES[family] | WITHOUT_DROPOUT[family] | options
    )
    torch.manual_seed(seed)
    return getattr(transformers, name)(config)
