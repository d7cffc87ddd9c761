"""Trainings on several ranks: a pool of processes, and the functions that its ranks run."""
