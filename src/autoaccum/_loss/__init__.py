"""Runs model and loss on a micro-batch, and weighs the result in the loss of its window.

Takes a micro-batch and the cut of its window, and returns loss terms with their graphs and the factors by which they
add up to the loss of the whole window. Infers what an unknown loss runs over from a few samples. May import `_data`,
`_memory`, `_system` and the modules in the package's root.
"""
