"""Runs one window as one exact optimizer update on one device, even if memory runs out on the way.

Takes a model, a loss, an optimizer and windows (`_data`); produces updates and `StepReport`s, gradients in `.grad`
(`accumulator.py`), evaluations, and trial results (`probing.py`). `runner.py` drives a window from start to finish;
`recovery.py` handles out-of-memory errors. May import `_sizing`, `_loss`, `_data`, `_memory` and `_system`. Other
processes are reached only through the protocol in `peers.py`.
"""
