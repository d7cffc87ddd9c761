"""A sample of `make architectures`: a card is predicted for these without a driver, on fake tensors."""

import sys

import pytest

from folders import ROOT

pytest.importorskip("transformers")
pytest.importorskip("torchvision")

sys.path.insert(0, str(ROOT / "benchmarks"))

import architectures

# The stock mixtures of experts choose their kernel by the card's capability.
SAMPLE = [
    ("transformers", "causal", "mixtral", "MixtralForCausalLM"),
    ("transformers", "causal", "qwen3_moe", "Qwen3MoeForCausalLM"),
    ("transformers", "causal", "llama", "LlamaForCausalLM"),
    ("transformers", "causal", "mamba", "MambaForCausalLM"),
    # A hybrid, a batch of codebooks, and layers that are dropped at random.
    ("transformers", "causal", "bamba", "BambaForCausalLM"),
    ("transformers", "causal", "musicgen", "MusicgenForCausalLM"),
    ("transformers", "sequence to sequence", "m2m_100", "M2M100ForConditionalGeneration"),
    ("transformers", "encoder", "bert", "BertForMaskedLM"),
    ("transformers", "sequence to sequence", "t5", "T5ForConditionalGeneration"),
    ("transformers", "image", "vit", "ViTForImageClassification"),
    ("torchvision", "image", "mobilenet_v3_small", "mobilenet_v3_small"),
]


@pytest.mark.parametrize("one", SAMPLE, ids=lambda one: one[3])
@pytest.mark.card_fakes
def test_architecture_is_predicted_for_a_card_without_a_driver(one):
    answer = architectures.predicted(*one)

    assert answer["how"] == architectures.FAKES, answer["why"]
    assert answer["peak_bytes"] > 0


@pytest.mark.card_fakes
def test_architecture_that_is_refused_in_bf16_is_predicted_in_fp32():
    answer = architectures.predicted("transformers", "encoder", "yoso", "YosoForMaskedLM")

    assert answer["how"] == architectures.FP32
    assert "expected scalar type" in answer["why"]


def test_causes_that_differ_in_numbers_alone_are_one():
    rows = [
        {"library": "transformers", "group": "causal", "architecture": name, "class": name, "how": "not", "why": why}
        for name, why in (("a", "no kernel for 1024 heads"), ("b", "no kernel for 4096 heads"), ("c", "other"))
    ]

    text = architectures.markdown(rows)

    assert "| transformers, causal | 0 | 0 | 0 | 3 | 0 |" in text
    assert "| no kernel for … heads | a, b |" in text
