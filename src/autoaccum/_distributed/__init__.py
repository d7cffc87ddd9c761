"""One window made by several ranks: each works on its part, then all make the same update.

In come this rank's part of a window and what the other ranks say (`process_group.py`); out comes the gradient of the
whole window on every rank (`data_parallel.py`, `fsdp.py`), a loader that gives each rank its part (`loader.py`), and
tensors that are spread over ranks in files (`dcp.py`). It may import `_engine` and what `_engine` may import.
"""
