"""Composes a run from the groups in `conf/` and starts it, as in `python run.py zero=stage3 offload=nvme`; see `--help`."""

import sys

from ztk.cli import main

if __name__ == "__main__":
    sys.exit(main())
