"""The runner with real processes: an unchanged script, a failing rank, two machines."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BLOCKS = ROOT / "tests" / "documents" / "blocks"  # the documents' own text
# As people write it for DeepSpeed: `import deepspeed` and its arguments, without ztk. It does not declare --local_rank.
TRAIN = """
import argparse, json, os
import torch
import deepspeed
from deepspeed.runtime.lr_schedules import WarmupLR

parser = argparse.ArgumentParser()
parser.add_argument("--out")
args = deepspeed.add_config_arguments(parser).parse_args()
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
deepspeed.init_distributed()
engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for _ in range(3):
    loss = engine(torch.ones(2, 8)).pow(2).mean()
    engine.backward(loss)
    engine.step()
told = {key: os.environ[key] for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CROSS_RANK")}
with open(f"{args.out}.{told['RANK']}", "w") as file:
    json.dump(told | {"loss": loss.item(), "module": deepspeed.__name__}, file)
"""


def start(*words, cwd, **environment):
    command = [sys.executable, "-m", "ztk.deepspeed", *map(str, words)]
    here = {"PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, cwd=cwd, env=os.environ | here, capture_output=True, text=True, timeout=120)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    (tmp_path / "ds.json").write_text(json.dumps(config | {"zero_optimization": {"stage": 2}}))
    return tmp_path


def results(folder, *, ranks=2):
    return [json.loads((folder / f"out.{rank}").read_text()) for rank in range(ranks)]


def test_document_000_by_its_own_command(tmp_path):
    """`deepspeed --num_gpus=4 train_zero.py --deepspeed_config ds_config_zero3.json`, with two ranks."""
    shutil.copy(BLOCKS / "000_train_zero.py", tmp_path / "train_zero.py")
    shutil.copy(BLOCKS / "000_ds_config_zero3.json", tmp_path / "ds_config_zero3.json")
    words = ("--num_gpus=2", "--enable_each_rank_log", "logs", "train_zero.py")
    done = start(*words, "--deepspeed_config", "ds_config_zero3.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 ranks (localhost: 2) rendezvous at 127.0.0.1:" in done.stderr
    first, second = sorted((tmp_path / "logs").iterdir(), key=lambda log: log.name[-6:])
    assert [re.sub(r"^\d+", "", log.name) for log in (first, second)] == ["_rank0.log", "_rank1.log"]
    assert "no optimizer was given" in first.read_text() and second.read_text() == ""


def test_ranks_on_their_own_cores(tmp_path):
    # To files: the ranks share an unbuffered stdout, where the words of one print may lie between another's.
    (tmp_path / "s.py").write_text(
        "import os\nfrom pathlib import Path\nfound = os.environ['OMP_NUM_THREADS'], sorted(os.sched_getaffinity(0))\n"
        "Path(os.environ['RANK']).write_text(repr(found))"
    )
    cores = sorted(os.sched_getaffinity(0))[:2]
    words = ("--num_gpus=2", "--bind_cores_to_rank", "--bind_core_list", ",".join(map(str, cores)), "s.py")
    if len(cores) < 2:  # it is refused instead
        done = start(*words, cwd=tmp_path)
        assert done.returncode == 2 and "2 ranks on 1 cores" in done.stderr
        return
    done = start(*words, cwd=tmp_path, OMP_NUM_THREADS="7")
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / rank).read_text() for rank in "01"] == [repr(("1", [core])) for core in cores]


def test_a_rank_that_fails_stops_all_and_its_code_is_the_commands(tmp_path):
    """The other rank would wait for a minute."""
    (tmp_path / "s.py").write_text("import os, sys, time\nos.environ['RANK'] == '1' and sys.exit(7)\ntime.sleep(60)")
    began = time.monotonic()
    done = start("--num_gpus", "2", "s.py", cwd=tmp_path)
    assert done.returncode == 7 and "rank 1 ended with exit code 7; the other ranks were stopped" in done.stderr
    assert time.monotonic() - began < 20


def test_two_machines_by_ssh(folder):
    """This machine by its names, and by a stand-in for ssh that runs its line in a shell, as sshd does."""
    program = folder / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/bash\nwhile [[ $1 == -* ]]; do [[ $1 == -[op] ]] && shift; shift; done\necho "$1" >> calls\nshift\n'
        'cd / && exec env -i PATH="$PATH" bash -c "$*"\n'
    )
    program.chmod(0o755)
    (folder / "hosts").write_text("localhost slots=1\nelsewhere slots=4\n")
    words = ("--hostfile", "hosts", "--num_gpus=1", "--launcher", "ssh", "--master_addr", "127.0.0.1")
    words += ("--master_port", free_port(), "train.py", "--deepspeed_config", "ds.json", "--out", "out")
    done = start(*words, cwd=folder, PATH=f"{program.parent}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    told = results(folder)
    assert [(one["RANK"], one["LOCAL_RANK"], one["CROSS_RANK"]) for one in told] == [("0", "0", "0"), ("1", "0", "1")]
    assert told[0]["loss"] == told[1]["loss"] and told[0]["module"] == "ztk.deepspeed"
    assert (folder / "calls").read_text() == "elsewhere\nelsewhere\n"  # whether it answers, and the run


def test_a_machine_that_fails_stops_the_others(tmp_path):
    program = tmp_path / "ssh"
    program.write_text('#!/bin/bash\n[[ $2 == pkill* ]] && echo "$*" >> stopped\nexit 9\n')
    program.chmod(0o755)
    (tmp_path / "s.py").write_text("import time\ntime.sleep(60)")
    (tmp_path / "hosts").write_text("localhost slots=1\nelsewhere slots=1\n")
    words = ("--hostfile", "hosts", "--launcher", "ssh", "--no_ssh_check", "--master_addr", "127.0.0.1", "s.py")
    began = time.monotonic()
    done = start(*words, cwd=tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 9 and "elsewhere ended with exit code 9; all machines were stopped" in done.stderr
    assert (tmp_path / "stopped").read_text().startswith("elsewhere pkill -TERM -f")
    assert time.monotonic() - began < 20


def test_what_cannot_be_started_is_said(tmp_path):
    done = start("nowhere.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "[ztk] nowhere.py: there is no such file\n")


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
