"""`autoaccum verify`: whether a training makes the same gradient however its batch is split.

A command or a function goes in, which runs once for each split up to its first optimizer steps, and a `Verification`
comes out. `runs.py` runs a command; `observer.py` watches in the process that trains; `comparison.py` compares what was
seen. May import `_launch` and everything below it.
"""
