"""`deepspeed.launcher.runner.main`: the command for programs that have a command of their own in front of it."""

import sys
from collections.abc import Sequence

from ztk.deepspeed.names.tree import module_of
from ztk.deepspeed.runner import remote
from ztk.deepspeed.runner.main import main as run


def main(args: Sequence[str] | None = None) -> None:
    """Runs `python -m ztk.deepspeed ARGS`; None: this process's arguments. Raises SystemExit with the code of a failure."""
    remote.EXPORT_ENVS[:] = list(module_of("deepspeed.launcher.runner").EXPORT_ENVS)  # a program may have set it there
    code = run(list(sys.argv[1:] if args is None else args))
    if code:
        raise SystemExit(code)
