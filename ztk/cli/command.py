"""The command `ztk`, also available as `python run.py` and `python -m ztk`, after its imports."""

import hydra
from omegaconf import DictConfig

from ztk.cli.session import Session
from ztk.config import conf_dir


def run(session: Session | None = None) -> int:
    """Runs the command line in `sys.argv` and returns its exit code. session: holds the results afterwards. Defaults to a new one."""
    session = session or Session()

    @hydra.main(version_base="1.3", config_path=conf_dir(), config_name="config")
    def compose_and_run(choices: DictConfig) -> float:
        return session.run_job(choices)

    return session.main(compose_and_run)
