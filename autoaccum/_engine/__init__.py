"""Makes one exact optimizer step from each window on one device, even if memory runs out on the way.

Takes a model, a loss, an optimizer and windows (`_data`); produces optimizer steps and `StepReport`s, gradients in
`.grad` (`accumulator.py`), evaluations, and trial results (`probing.py`). Within a window:

    window_runner.py    WindowRunner.step: the optimizer step
      window.py         attempts at a window; restores the state before it where one fails
        micro_batches.py  the loop over micro-batches, by `forward_backward.py` or (a loss over the whole window)
                        `window_loss.py`
      peers.py          gradients of several processes, or of this one, become the window's
      optimizer_step.py reserves memory and steps

May import `_sizing`, `_loss`, `_data`, `_memory` and `_system`. Other processes are reached only through `peers.py`.
"""
