"""`python -m autoaccum`: the command line."""

from autoaccum._cli.app import main

main()
