"""Keys of a sweep, which is several runs: `sweep.KEY=VALUE` on the command line. No run has them in its configuration."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ztk.core.policies.key import key
from ztk.core.policies.launch import Starter
from ztk.core.policies.ranges import COUNT, Range


class RepeatWith(StrEnum):
    """sweep.repeat_with: the difference between the repeats of a job."""

    same_seed = "same_seed"  # nothing: for speed
    seeds = "seeds"  # train.seed is 0, 1, 2, ..: for losses


@dataclass(kw_only=True)
class SweepConfig:
    """A named grid of runs, or one given with -m. No sweep runs unless the command line names one."""

    resume: str | None = key(
        "folder of a sweep to continue: finished jobs stay, failed jobs start again, interrupted jobs continue from their "
        "checkpoint; without other arguments, its recorded command line is used"
    )
    retries: int | None = key(
        "how often a failed job is started again; null: once with sweep.resume, else never",
        range=Range(low=0, high=1000),
    )
    list: bool = key("print the jobs with their folders, states and plans, start none", default=False)
    hardware: str | None = key(
        "hardware for the plans of sweep.list and sweep.skip_misfits, an option of the group hardware; null: they do not check whether a "
        "job fits"
    )
    skip_misfits: bool = key(
        "record does_not_fit for jobs that do not fit on sweep.hardware by their plan, and start the others",
        default=False,
    )
    repeats: int = key("runs of every job, interleaved: all jobs once, then all again", default=1, range=COUNT)
    quick: bool = key("every job has train.quick=true: no evaluation, no sample of text and no picture", default=False)
    repeat_with: RepeatWith | None = key(
        "seeds: repeats have train.seed 0, 1, 2, ..; same_seed: repeats are equal, for speed alone; null: seeds, or same_seed where the "
        "command line sets train.seed"
    )

    launcher: Starter | None = key(
        "launch=LAUNCHER for every job: ray runs jobs at once on a Ray cluster, slurm submits them as a job array; null: launch decides"
    )
    parallel: int | None = key(
        "how many jobs run at once with launch=ray and launch=slurm; null: as many as get resources", range=COUNT
    )

    def varied(self, words: Sequence[str]) -> RepeatWith:
        """`repeat_with`, or its default for a command line of `words`."""
        if self.repeat_with is not None:
            return self.repeat_with
        is_told = any(word.lstrip("+").startswith("train.seed=") for word in words)
        return RepeatWith.same_seed if is_told or self.repeats == 1 else RepeatWith.seeds
