"""`fit`: the loop over epochs around the runner, with plans, checkpoints, evaluation, schedulers, progress and logs.

Takes a model, a loader and settings, and returns a `FitResult`; the model is trained in place, and checkpoints and logs
are files. May import every package but `_estimate`, `_report`, `_launch` and `_cli`: training needs no predictions.
"""
