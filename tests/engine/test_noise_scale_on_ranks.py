"""The noise of gradients is that of all ranks together."""

import pytest
import torch


@pytest.mark.parametrize("ranks", [1, 3])
def test_noise_of_gradients_is_the_same_on_one_rank_and_on_several(rank_pool, ranks):
    first, *others = rank_pool.run("noise:noise", size=ranks)

    assert all(other == first for other in others)
    variances, squared_norms, samples = (torch.tensor(values).double() for values in zip(*first, strict=True))
    assert set(samples.tolist()) == {24.0}
    expected = float((torch.linspace(0.5, 1.5, 12) ** 2).sum()), 12 * 0.3**2
    for found, value in zip((variances, squared_norms - variances / 24), expected, strict=True):
        assert abs(float(found.mean()) - value) < 4 * float(found.std()) / len(first) ** 0.5
