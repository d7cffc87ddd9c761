"""Trainings on several ranks, of which tests are tables: a row says what is trained, on how many ranks, and what holds.

`rows.py` says what a row is, and `expect.py` what may hold; ranks train by `training.py` (`fit`) or `loops.py` (an
accumulator), models are spread by `sharded.py`, and memory runs out by `lacking.py`. Tests of what no row can say run a
function on the ranks of `pool.py` themselves, as those of frameworks do. What ends in `_job.py` is started by torchrun
or Ray.
"""
