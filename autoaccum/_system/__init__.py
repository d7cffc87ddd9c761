"""Files, signals, processes, environment variables and stderr, made safe for long trainings.

Provides atomic file writes, locks on folders, delayed signals and notices on stderr. Independent of models and
training. May import only the modules in the package's root.
"""
