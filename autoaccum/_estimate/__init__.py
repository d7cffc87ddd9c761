"""Predicts the peak memory of a training step, without the device and without running it.

`estimate.estimate_step`, or `trace_step` for several GPUs, takes a model, a batch, a loss and an optimizer as `fit`
does, and returns an `Estimate` of `_sizing`, for the CPU or for a GPU of `gpus`. No memory is allocated and nothing is
timed. May import `_engine` and all packages below it, but neither `_report` nor `_training`.
"""
