"""Compose a run from the groups in `conf/` and go, as in `python run.py zero=stage3 offload=nvme`; see `--help`."""

import sys

import hydra
from omegaconf import DictConfig

from ztk.cli import Session
from ztk.config import conf_dir

session = Session()


@hydra.main(version_base="1.3", config_path=conf_dir(), config_name="config")
def run(choices: DictConfig) -> float:
    """Runs one composed job. Returns its final loss."""
    return session.run_job(choices)


if __name__ == "__main__":
    sys.exit(session.main(run))
