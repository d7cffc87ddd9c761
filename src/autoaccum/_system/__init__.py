"""Files, signals, processes, environment variables and stderr, made safe for long trainings.

Takes paths, bytes, signals and variables, and provides whole files, leases on folders, delayed signals and notices on
stderr. Knows nothing of models or training. May import the modules in the package's root alone.
"""
