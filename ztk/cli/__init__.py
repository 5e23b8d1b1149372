"""The command line on top of Hydra: arguments, jobs, tables of jobs, exit codes. Does not import torch."""

import sys
from typing import TYPE_CHECKING

from ztk.core.launch.signals import noted_signals

if TYPE_CHECKING:
    from ztk.cli.session import Session


def main(session: "Session | None" = None) -> int:
    """Runs the command line in `sys.argv` and returns its exit code. session: holds the results afterwards. Defaults to a new one.

    Imports follow the installation of the signal handlers, so that Ctrl-C during an import ends the command, too.
    """
    with noted_signals():
        try:
            from ztk.cli.session import run
        except KeyboardInterrupt:
            print(
                "ztk: interrupted before a run started: nothing has changed, start the command again", file=sys.stderr
            )
            return 130
        except ModuleNotFoundError as error:
            if (error.name or "ztk").partition(".")[0] == "ztk":  # a fault of ztk's, whose traceback is needed
                raise
            print(
                f"ztk: {sys.executable} has no package {error.name}: activate the environment in which ztk is installed "
                "(source .venv/bin/activate), or install ztk: pip install -e . -c constraints.txt",
                file=sys.stderr,
            )
            return 2
        return run(session)
