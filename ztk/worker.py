"""One rank of a run: `python -m ztk.worker CONFIG_YAML` reads the run, imports the task's module and calls its `main(config)`.

Exit codes: 0 done, 1 failed (the error lies in `ranks/rank{r}.error.json`), 130 interrupted.
"""

import importlib
import os
import sys

from ztk.config import Config, load
from ztk.launch import failure_of, log_path, write_failure
from ztk.launch.tee import log_to


def main() -> int:
    config = load(sys.argv[1])
    return run_task(config, rank=int(os.environ["RANK"]))


def run_task(config: Config, *, rank: int) -> int:
    """The whole life of a rank. Returns after success; a failing rank ends the process here.

    It ends without any teardown: closing a process group that has lost a member can wait for ever, and the peers would report the
    closed connection as their error.
    """
    log = log_to(log_path(config.output_dir, rank=rank)) if rank == 0 else sys.stderr
    try:
        import torch

        torch.set_num_threads(config.launch.threads)
        importlib.import_module(config.task.module).main(config)
    except KeyboardInterrupt:
        _leave(130)
    except Exception as error:
        failure = failure_of(error, rank=rank)
        write_failure(failure, output_dir=config.output_dir)
        log.write(failure.trace)
        _leave(1)
    return 0


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
