"""Losses in many forms, their gradients over a whole batch, and loops that accumulate them wrongly."""
