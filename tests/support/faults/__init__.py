"""Faults on purpose: operators, lines and processes that fail, and how a training is judged afterwards."""
