"""`python -m autoaccum`: the command line."""

from autoaccum.cli import main

main()
