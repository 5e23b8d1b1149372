"""A launcher that runs every job in a process of its own, as joblib and submitit do: nothing comes back from it but the folders."""

import os
import sys

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from omegaconf import open_dict


class ForkingLauncher(Launcher):
    def setup(self, *, hydra_context, task_function, config) -> None:
        self.context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides, initial_job_idx):
        return [self.start(list(overrides), number) for number, overrides in enumerate(job_overrides, initial_job_idx)]

    def start(self, overrides, number):
        child = os.fork()
        if not child:
            setup_globals()
            config = self.context.config_loader.load_sweep_config(self.config, overrides)
            with open_dict(config):
                config.hydra.job.id = config.hydra.job.num = number
            keys = {"job_dir_key": "hydra.sweep.dir", "job_subdir_key": "hydra.sweep.subdir"}
            run_job(hydra_context=self.context, task_function=self.task_function, config=config, **keys)
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)
        return JobReturn(_return_value=None, status=JobStatus.COMPLETED)


ConfigStore.instance().store(
    group="hydra/launcher", name="forking", node={"_target_": "hydra_plugins.forking.ForkingLauncher"}
)
