"""One window in, one optimizer update out, on one device, exactly, also when memory runs out on the way.

In come a model, a loss, an optimizer and windows (`_data`); out come updates and `StepReport`s, gradients in `.grad`
(`accumulator.py`), evaluations, and sizes that were tried (`probing.py`). `runner.py` is the life of a window,
`recovery.py` what happens in it when memory runs out. It may import `_sizing`, `_loss`, `_data`, `_memory` and
`_system`; it knows other processes by the protocol in `peers.py` alone.
"""
