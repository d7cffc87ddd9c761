"""Predictions: the peak memory of a training step, without the device and without running it.

A model, a batch, a loss and an optimizer come in as `fit` takes them (`estimate.estimate_step`, or `trace_step` for
several cards); out comes an `Estimate` of `_sizing`, for the CPU or for a card of `gpus`. No memory is taken and
nothing is timed. May import `_engine` and all packages below it, but neither `_report` nor `_training`.
"""
