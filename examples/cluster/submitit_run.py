"""A run as a job of submitit, which saves before submitit's time limit or a preemption and continues when submitit has requeued it.

python examples/cluster/submitit_run.py zero=stage3 model=7b checkpoint.every=200 hydra.run.dir=/shared/run
"""

import os
import signal
import subprocess
import sys

import submitit


class Run:
    """`python run.py WORDS` on one node, whose ranks this command starts. The folder in WORDS must be shared."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def __call__(self) -> None:
        """Runs in the job."""
        self.process = subprocess.Popen([sys.executable, "run.py", *self.words])
        _, status = os.waitpid(self.process.pid, 0)  # not `wait`, which `checkpoint` could not call inside of it
        if code := os.waitstatus_to_exitcode(status):
            raise RuntimeError(f"run.py ended with code {code}")

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Called by submitit in the handler of its signal: waits until the step is saved, and returns the job to requeue."""
        self.process.send_signal(signal.SIGUSR2)
        os.waitpid(self.process.pid, 0)
        return submitit.helpers.DelayedSubmission(Run(*self.words))


if __name__ == "__main__":
    executor = submitit.AutoExecutor(folder="submitit")
    executor.update_parameters(
        timeout_min=24 * 60, nodes=1, tasks_per_node=1, gpus_per_node=8, slurm_signal_delay_s=300
    )
    print(executor.submit(Run(*sys.argv[1:])).job_id)
