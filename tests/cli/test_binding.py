"""`launch.bind_cores`: from the command line to the affinity of the ranks."""

import pytest

from tests.cli.test_run import FAKE, run
from ztk.core.launch.binding import Cores, cores_of_ranks

PROGRAM = """
import os
from pathlib import Path

def main(config):
    Path(config.output_dir, f"cores{os.environ['RANK']}").write_text(" ".join(map(str, sorted(os.sched_getaffinity(0)))))
    Path(config.output_dir, "summary.json").write_text('{"status": "done"}')
"""


def test_ranks_have_the_cores_that_the_command_asks_for(tmp_path):
    places = range(min(2, sum(map(len, Cores.here().by_node.values()))))
    task = tmp_path / "mine/conf/task/cores.yaml"
    task.parent.mkdir(parents=True)
    task.write_text("name: cores\nmodule: own_cores\n")
    (tmp_path / "mine/own_cores.py").write_text(PROGRAM)
    own = ("--config-dir", str(tmp_path / "mine/conf"), "task=cores")
    words = (*own, "launch.bind_cores=true", f"launch.ranks={len(places)}", "launch.device=cpu", "launch.threads=1")
    done = run(*words, "train.steps=1", "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = [tuple(map(int, (tmp_path / f"run/cores{rank}").read_text().split())) for rank in places]
    assert found == cores_of_ranks(places, on_gpus=False, threads=1)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("launch.ranks=1", "launch.threads=4000"), "use launch.threads="),
        (("launch=slurm",), "launch.bind_cores=true has no effect"),
    ],
)
def test_a_run_that_cannot_bind_is_refused(tmp_path, words, fault):
    done = run(*FAKE, "launch.bind_cores=true", *words, cwd=tmp_path)
    assert done.returncode == 2 and fault in done.stderr, done.stderr
    assert not list(tmp_path.rglob("config.yaml"))
