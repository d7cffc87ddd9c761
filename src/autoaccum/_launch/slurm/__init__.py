"""Jobs of a Slurm cluster.

`submission.py` takes a recipe and options of Slurm and submits a batch script; on the nodes `task.py` trains, and
`again.py` decides after each step whether another one follows. All of them meet in the job's folder (`folder.py`), from
which `listing.py` makes the list of jobs. May import `_launch` beside it and everything below `_launch`; submitit, an
extra, only inside functions.
"""
