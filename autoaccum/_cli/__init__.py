"""The command line: what is typed, what is printed to which stream, and which exit code follows.

`app.py` holds the group and its help; each command is loaded when it is called, so that help and `autoaccum run` start
without torch. May import everything; nothing imports it.
"""
