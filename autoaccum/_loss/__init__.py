"""Runs the model and the loss on a micro-batch, and weights the result within the loss of its window.

What a loss weighs is found in this order: `objective` runs it and makes `terms` of what it returns; `graph_reader`
reads from the graph what each term is divided by; `loss_check` confirms that once, on a few samples; `loss_forms` keeps
what is known; `loss_weights` multiplies each micro-batch's loss by its weight. May import `_data`, `_memory`, `_system`
and the modules in the package's root.
"""
