"""Makes one exact optimizer update from each window on one device, even if memory runs out on the way.

Takes a model, a loss, an optimizer and windows (`_data`); produces updates and `StepReport`s, gradients in `.grad`
(`accumulator.py`), evaluations, and trial results (`probing.py`). Read `window.py` first, then `runner.py`. May
import `_sizing`, `_loss`, `_data`, `_memory` and `_system`. Other processes are reached only through `peers.py`.
"""
