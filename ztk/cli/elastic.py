"""Restarts the remaining ranks of a run after others were killed."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ztk import config as configuration
from ztk.cli.interrupted import saving_notice
from ztk.config import Config, ConfigError
from ztk.core.launch import RankError, run_ranks, worker_command
from ztk.core.launch.binding import cores_of_ranks
from ztk.core.policies.launch import LaunchConfig
from ztk.report.folder import SUMMARY, write_json
from ztk.report.status import read_summary


def run_until_done(config: Config, *, say: Callable[..., None]) -> None:
    """Runs the ranks of `config` on this machine.

    With `launch.elastic`, the remaining ranks continue from the latest checkpoint after signals killed some.

    Each start writes `config.yaml`; the logs of an earlier start are kept in `ranks-of-N`. GPUs of lost ranks are not used again. The
    summary lists the lost ranks as `lost_ranks`.

    Raises:
        RankError: a rank failed in another way, or too few ranks are left.
    """
    folder = Path(config.output_dir)
    places, losses = list(range(config.launch.ranks)), []
    while True:
        configuration.save(config, path=folder / "config.yaml")
        command = worker_command(folder / "config.yaml")
        launch = config.launch
        try:
            started = 1 if config.task.name == "plan" else launch.ranks
            run_ranks(
                command,
                ranks=started,
                threads=launch.threads,
                output_dir=folder,
                places=places[:started],
                drain_seconds=config.serve.drain_seconds or 0.0,  # set for task=serve only
                save_seconds=config.checkpoint.grace_seconds or 0.0,  # set only for tasks that train and save
                on_signal=partial(say, saving_notice(config)),
                debug=launch.debug,
                cores=bound_cores(launch, places=places[:started]),
            )
            break
        except RankError as error:
            elastic = launch.elastic and error.failure.killed
            smaller = configuration.on_fewer_ranks(config, lost=len(error.killed)) if elastic else None
            if smaller is None:
                raise
            losses.append(f"{error} (of {launch.ranks})")
            places = [place for rank, place in enumerate(places) if rank not in error.killed][: smaller.launch.ranks]
            say(f"{error}: the run goes on with {smaller.launch.ranks} of {launch.ranks} ranks")
        set_aside(folder / "ranks", name=f"ranks-of-{launch.ranks}")
        config = smaller
    if losses:
        write_json(folder / SUMMARY, values=read_summary(folder) | {"lost_ranks": losses})


def bound_cores(launch: LaunchConfig, *, places: Sequence[int]) -> list[tuple[int, ...]] | None:
    """The cores of each rank with `launch.bind_cores`, else None. places: GPU of each rank.

    Raises:
        ConfigError: a rank would have no core, or fewer than `launch.threads`.
    """
    if not launch.bind_cores:
        return None
    try:
        return cores_of_ranks(places, on_gpus=launch.device == "cuda", threads=launch.threads)
    except ValueError as error:
        raise ConfigError([str(error)]) from None


def set_aside(path: Path, *, name: str) -> None:
    """Renames the folder to `name`, or to `name.2`, `name.3`, .. if an earlier run in the same folder has used that name."""
    target, number = path.with_name(name), 1
    while target.exists():
        number += 1
        target = path.with_name(f"{name}.{number}")
    path.rename(target)
