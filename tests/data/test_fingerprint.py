"""Batches that differ have other fingerprints."""

# ruff: noqa: S311 - samples are drawn

import random
from collections import UserDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from autoaccum._data.fingerprint import fingerprint_of


@dataclass
class Graph:
    x: torch.Tensor
    whole: object = None


def images():
    """Like pictures of digits: most of each is empty."""
    made = torch.zeros(1024, 28, 28)
    made[:, 10:20, 10:20] = torch.rand(1024, 10, 10)
    return made


BATCHES = {
    "images": images,
    "labels": lambda: torch.randint(9, (64,)),
    "flags": lambda: torch.rand(64) < 0.5,
    "bf16": lambda: torch.randn(8, 3).bfloat16(),
    "fp8": lambda: torch.randn(64).to(torch.float8_e4m3fn),
    "complex": lambda: torch.randn(8, dtype=torch.complex64).conj(),
    "columns": lambda: torch.randn(300, 200).t(),
    "number": lambda: torch.randn(()),
    "arrays": lambda: {"x": np.random.default_rng(torch.initial_seed()).random((5, 2))},
    "texts": lambda: [str(random.random()) for _ in range(9)],
    "samples": lambda: [{"ids": [random.randrange(99) for _ in range(9)]} for _ in range(40)],
    "mapping": lambda: UserDict(x=torch.randn(3)),
    "graph": lambda: Graph(torch.randn(3)),
    "packed": lambda: pack_sequence([torch.randn(3), torch.randn(2)]),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches_that_differ_are_told_apart_and_equal_ones_are_not(name):
    def made(seed):
        for generator in (torch.manual_seed, random.seed, np.random.seed):
            generator(seed)
        return fingerprint_of(BATCHES[name]())

    assert made(1) == made(1)
    assert made(1) != made(2)


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(0),
        torch.zeros(3, device="meta"),
        torch.eye(3).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        [None, 1.5, True, b"x", object(), {1, 2}],
        np.array(["a", None], dtype=object),
    ],
    ids=["empty", "meta", "sparse", "nested", "objects", "array of objects"],
)
def test_whatever_a_loader_may_yield_has_one(batch):
    assert fingerprint_of(batch) == fingerprint_of(batch)


def test_objects_that_hold_one_another_come_to_an_end():
    graph = Graph(torch.ones(2))
    graph.whole = graph

    assert fingerprint_of(graph) == fingerprint_of(graph)
