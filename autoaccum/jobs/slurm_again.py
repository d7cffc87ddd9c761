"""Former name of the module that batch scripts in a Slurm queue run after each round of a job."""

import sys

from autoaccum._launch.slurm.again import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
