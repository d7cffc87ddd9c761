"""Two features of `fit` at once give what a plain loop gives, or are refused."""

import pytest

from support.training import feature_pairs


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "gpt" else ()) for name in feature_pairs.MODELS]
)
def test_pair_of_features_trains_as_a_plain_loop_or_is_refused(name, rank_pool, tmp_path):
    wrong, trained = [], 0
    chosen = feature_pairs.each_once(name)

    for number, features in enumerate(chosen):
        outcomes = feature_pairs.outcomes_of(rank_pool, name, features, str(tmp_path / str(number)))
        trained += not outcomes[0].error
        wrong += [f"{' and '.join(features)}: {one}" for one in feature_pairs.judged(name, features, outcomes)]

    assert wrong == []
    assert trained > len(chosen) // 2
