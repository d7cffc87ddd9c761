"""A small job, and its training by each framework, in one process or by several ranks.

`jobs.py` says what a job is; `by_NAME.py` trains it by that framework, with autoaccum's adapter or as it is by itself.
"""
