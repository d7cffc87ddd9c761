"""Adapters for the training loops of other frameworks, one module each, imported only when asked for.

A framework's batch comes in, and its gradient goes to `.grad` by `autoaccum.Accumulator`, in micro-batches that fit.
The loop, the optimizer, the scheduler, logging and checkpoints stay the framework's. Adapters may import from every
package but the command line; nothing imports them.
"""
