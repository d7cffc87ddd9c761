"""Runs jobs on a Slurm cluster.

`submission.py` submits a batch script for a recipe and Slurm options; on the nodes `task.py` trains, and `again.py`
decides after each step whether another follows. They share the job's folder (`folder.py`), from which `listing.py`
lists jobs. May import `_launch` and everything below it; submitit, an extra, only inside functions.
"""
