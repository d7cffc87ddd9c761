"""Runs the model and the loss on a micro-batch, and weighs the result within the loss of its window.

`calls` runs the model and the loss, and `objective` makes `loss_values` of what they return: a list of summands S / w.
`graph_reader` reads w from the graph; `sample_check` confirms once, on a few samples, that sums and weights add up
(`comparison`); `knowledge` keeps what is known of each of the `summands`; `window_weights` multiplies each loss of a
micro-batch by w / P, where P predicts the sum of w; at the end `explaining` compares divisors with what the batch
counts, and `settling` finds what gradients are multiplied by.
`evaluated` reads S and w without a backward pass. May import `_data`, `_memory`, `_system` and the modules in the
package's root.
"""
