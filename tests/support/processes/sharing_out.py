"""How test files are shared out among workers: each is one worker's, and those of several ranks all the same one's.

What the tests of a file share is made once so. The ranks are four processes, which take both cores of a small machine
by themselves: two workers with four each would wait for each other. They come first, since nothing takes as long.
"""

from pathlib import Path

OF_RANKS = {path.name for path in Path(__file__).parents[2].rglob("test_*.py") if "rank_pool" in path.read_text()}


def first_those_of_ranks(items):
    items.sort(key=lambda item: item.path.name not in OF_RANKS)


def scheduler(config, log):
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415 - only there where there are workers

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "ranks" if Path(file).name in OF_RANKS else file

    return ByFile(config, log)
