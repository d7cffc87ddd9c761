"""The command line: writes results to stdout and text to stderr, and returns an exit code.

`app.py` has the entry point and `fit`; `report.py`, `run.py` and `slurm.py` have the other commands. `options.py` makes
the options for `fit`'s arguments from `fit` itself, and `exit_codes.py` turns errors into exit codes. The commands
leave all decisions to the library. May import every other package; none imports it.
"""
