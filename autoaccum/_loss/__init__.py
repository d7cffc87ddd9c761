"""Runs the model and the loss on a micro-batch, and weights the result within the loss of its window.

From a micro-batch and the cut of its window, it computes loss terms with their graphs, and the factors with which they
sum to the loss of the whole window. Tries an unknown loss on a few samples. May import `_data`,
`_memory`, `_system` and the modules in the package's root.
"""
