"""`python -m ztk`, which is `python run.py`: for launchers that start a module, as in `torchrun -m ztk zero=stage3`."""

import sys

from ztk.cli import main

if __name__ == "__main__":
    sys.exit(main())
