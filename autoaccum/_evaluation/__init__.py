"""Evaluates a model on a loader, losses by their sums and weights, and metrics; runs any function in parts that fit.

Takes a step (`_engine`) and batches; gives an `Evaluation`, or what a function returns. Nothing is searched for:
without gradients a batch nearly always fits. Where it does not, parts get smaller as in training
(`parts_that_fit.py`).
May import `_engine` and the packages below it.
"""
