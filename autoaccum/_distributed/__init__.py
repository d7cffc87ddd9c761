"""Runs one window on several ranks: each works on its part, then all make the same optimizer step.

Takes this rank's part of a window and messages from the other ranks (`process_group.py`); produces the gradient of the
whole window on every rank (`data_parallel.py`, `fsdp.py`). Also contains a loader that gives each rank its part
(`loader.py`), and whole states of sharded models (`whole_state.py`). May import `_engine` and what that may import.
"""
