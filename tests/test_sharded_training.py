"""`fit` with models that `fully_shard` has spread over ranks: the gradient of the global window all the same."""

import pytest
import torch

import autoaccum
import rank_training

FAR = 1e-12


def far(one, other):
    return max(float((a - b).norm() / b.norm()) for a, b in zip(one, other, strict=True))


def alone(*, norm=False, **arguments):
    return rank_training.train(0, 1, model=rank_training.net(norm=norm), **arguments)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("loss", [name for name in rank_training.LOSSES if name != "several"])
def test_parameters_are_those_of_one_process_with_the_whole_batch(crew, loss, size):
    expected = alone(loss=loss, target_batch=16, micro_batch=16, epochs=2)

    found = crew.run("sharded_training:train", size=size, loss=loss, target_batch=16, micro_batch=3, epochs=2, shard=True)

    for one in found:
        assert far(one["parameters"], expected["parameters"]) <= FAR
        assert one["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert one["samples"] == expected["samples"]
