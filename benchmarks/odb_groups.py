"""Groups texts as online-dynamic-batching does; runs in an environment of its own, which has that package.

    .venv-odb/bin/python benchmarks/odb_groups.py < request.json > groups.json

The request has the lengths of texts in the loader's order, and the `token_budget`. The answer is a list of batches,
each the places of its texts.
"""

import json
import sys

import odb
import torch


class Texts(torch.utils.data.Dataset):
    """Texts of which only the lengths matter."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, place):
        ids = torch.zeros(self.lengths[place], dtype=torch.int64)
        return {"input_ids": ids, "attention_mask": ids + 1, "labels": ids, "place": torch.tensor(place)}


def places(samples):
    found = torch.stack([one["place"] for one in samples])
    return {"input_ids": found}  # a batch without is taken for none


def main():
    asked = json.load(sys.stdin)
    loader = odb.ODBDataLoader(
        Texts(asked["lengths"]),
        token_budget=asked["token_budget"],
        batch_size=1,
        shuffle=False,  # the order is random already
        num_workers=2,
        prefetch_factor=64,
        collate_fn=places,
    )
    json.dump([batch["input_ids"].tolist() for batch in loader], sys.stdout)


if __name__ == "__main__":
    main()
