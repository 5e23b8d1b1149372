"""The signals that end a run in order: its step is finished and saved."""

import signal

# Ctrl-C, a service's stop, and the warnings that Slurm, submitit and Lightning send before a time limit.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
