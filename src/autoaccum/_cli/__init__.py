"""The command line: arguments go in; results on stdout, text on stderr and an exit code come out.

`app.py` has the entry point and `fit`; `report.py`, `run.py` and `slurm.py` have the other commands. `options.py` makes
the options for `fit`'s arguments from `fit` itself, and `exit_codes.py` turns errors into exit codes. The commands
decide nothing that the library does not decide. May import every other package; none imports it.
"""
