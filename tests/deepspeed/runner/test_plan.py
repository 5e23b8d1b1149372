"""The runner's plan: the environment and the command of every machine and rank, from a command line. Nothing is started."""

import sys
from argparse import Namespace
from dataclasses import replace

import pytest

from ztk.deepspeed.names import SHIM
from ztk.deepspeed.runner import hosts as where
from ztk.deepspeed.runner.hosts import Host, filtered, first, read_hostfile, this_machine
from ztk.deepspeed.runner.main import choose_hosts, make_plan, read_options
from ztk.deepspeed.runner.node import Plan, cores_of, local_rank_word, rank_command, rank_environment
from ztk.deepspeed.runner.remote import exported, reach

TWO = [Host(name="one", slots=("0", "1")), Host(name="two", slots=("0", "1", "2"))]
PLAN = Plan(
    hosts=tuple(TWO),
    master_addr="10.0.0.1",
    master_port=29500,
    script="train.py",
    arguments=("--name", "a b", "100%"),
    module=False,
    python=True,
    pass_local_rank=True,
    log_folder=None,
    bind_cores=False,
    cores=None,
    quiet=True,
    run_id="x",
)


def names(hosts):
    return {host.name: "".join(host.slots) for host in hosts}


def test_a_hostfile(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# all\n\none slots=2\ntwo   slots=3  # faster\n")
    assert names(read_hostfile(file)) == {"one": "01", "two": "012"}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("one slots=2\nonly-a-name\n", "line 2: 'only-a-name' must look like `worker-0 slots=4`"),
        ("one slots=2\none slots=2\n", "line 2: one is listed twice"),
        ("# nothing\n", "lists no machine"),
        ("-oProxyCommand=true slots=1\n", "line 1: -oProxyCommand=true is no machine's name"),
    ],
)
def test_a_wrong_hostfile(tmp_path, text, fault):
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(ValueError, match=fault):
        read_hostfile(file)


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("", "", {"one": "01", "two": "012"}),
        ("two", "", {"two": "012"}),
        ("one@two:0,2", "", {"one": "01", "two": "02"}),
        ("two:2@two:0", "", {"two": "02"}),
        ("", "two:1", {"one": "01", "two": "02"}),
        ("", "one", {"two": "012"}),
    ],
)
def test_include_and_exclude(include, exclude, left):
    assert names(filtered(TWO, include=include, exclude=exclude)) == left


@pytest.mark.parametrize(
    ("include", "exclude", "fault"),
    [
        ("one", "two", "give one of them"),
        ("three", "", "there is no machine three; there is one, two"),
        ("", "two:7", "two has no slot 7"),
        ("", "one@two", "leaves no device"),
    ],
)
def test_what_is_not_there_is_said(include, exclude, fault):
    with pytest.raises(ValueError, match=fault):
        filtered(TWO, include=include, exclude=exclude)


def test_the_first_machines_and_devices():
    assert names(first(TWO, num_nodes=1, num_gpus=None)) == {"one": "01"}
    assert names(first(TWO, num_nodes=None, num_gpus=1)) == {"one": "0", "two": "0"}
    with pytest.raises(ValueError, match="--num_nodes=3: the hostfile lists 2"):
        first(TWO, num_nodes=3, num_gpus=None)
    with pytest.raises(ValueError, match="--num_gpus=3: the hostfile gives one 2 slots"):
        first(TWO, num_nodes=None, num_gpus=3)


def test_devices_of_this_machine(monkeypatch):
    """DeepSpeed ignores CUDA_VISIBLE_DEVICES if a number of GPUs is given; here the number chooses among the visible ones."""
    monkeypatch.setattr(where, "_count_gpus", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert this_machine(num_gpus=None).slots == ("0", "1", "2", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert this_machine(num_gpus=None).slots == ("2", "3")
    assert this_machine(num_gpus=1).slots == ("2",)
    with pytest.raises(ValueError, match="--num_gpus=3: this machine has 2 that CUDA_VISIBLE_DEVICES=2,3 leaves"):
        this_machine(num_gpus=3)
    monkeypatch.setattr(where, "_count_gpus", lambda: 0)
    assert this_machine(num_gpus=None).slots == ("0",)
    assert this_machine(num_gpus=3).slots == ("0", "1", "2")


def test_choice_of_hosts(tmp_path, monkeypatch):
    monkeypatch.setattr(where, "_count_gpus", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    file = tmp_path / "hosts"
    file.write_text("one slots=2\ntwo slots=3\n")
    hosts, listed = choose_hosts(read_options(["--hostfile", str(file), "--num_gpus", "2", "a.py"]))
    assert listed and names(hosts) == {"one": "01", "two": "01"}
    assert names(choose_hosts(read_options(["--include", "localhost:1", "a.py"]))[0]) == {"localhost": "1"}
    for words, fault in (
        (["--num_nodes", "2", "a.py"], "list the machines in a hostfile"),
        (["--hostfile", "nowhere", "a.py"], "there is no such file"),
        (["--hostfile", str(file), "--no_ssh", "--node_rank", "2", "a.py"], "must be from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=fault):
            choose_hosts(read_options(words))


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--num_gpus", "1", "--include", "a", "s.py"], "use one of the ways"),
        (["--no_python", "--module", "s"], "a module is run by python"),
        (["--no_ssh", "s.py"], "give this machine's number with --node_rank"),
        (["--node_rank", "0", "s.py"], "no effect without --no_ssh"),
        (["--bind_core_list", "1-2", "s.py"], "no effect without --bind_cores_to_rank"),
        (["--bind_core_list", "1-", "--bind_cores_to_rank", "s.py"], "must be a number or a range"),
        (["--autotuning", "run", "s.py"], "--autotuning is not offered"),
        (["--save_pid", "s.py"], "--save_pid is not offered"),
        (["--launcher", "openmpi", "s.py"], "--no_ssh --node_rank=$OMPI_COMM_WORLD_RANK SCRIPT"),
        (["--launcher", "k8s", "s.py"], "invalid choice: 'k8s'"),
        (["--num_gpus", "0", "s.py"], "must be 1 or more"),
    ],
)
def test_a_wrong_line_is_refused(words, fault, capsys):
    with pytest.raises(SystemExit):
        read_options(words)
    assert fault in capsys.readouterr().err


def test_what_follows_the_script_is_the_scripts(tmp_path):
    options = read_options(
        ["--num_gpus", "-1", "--bind_cores_to_rank", "--bind_core_list", "1,3-5", "s.py", "--num_gpus", "9"]
    )
    assert options.arguments == ("--num_gpus", "9") and options.num_gpus is None
    assert options.bind_core_list == (1, 3, 4, 5)
    with pytest.raises(ValueError, match="s.py: there is no such file"):
        make_plan(options, hosts=TWO, launcher=None, alone=True)
    script = tmp_path / "s.py"
    script.write_text("")
    plan = make_plan(Namespace(**{**vars(options), "script": str(script)}), hosts=TWO, launcher=None, alone=True)
    assert plan.master_addr == "127.0.0.1" and plan.master_port != 29500


def test_machines_started_by_hand_rendezvous_at_the_first(tmp_path):
    """No ssh call is needed; the port is the same everywhere."""
    script = tmp_path / "s.py"
    script.write_text("")
    options = read_options(["--no_ssh", "--node_rank", "1", str(script)])
    plan = make_plan(options, hosts=TWO, launcher=None, alone=False)
    assert (plan.master_addr, plan.master_port) == ("one", 29500)


def test_a_plan_survives_the_command_line():
    assert Plan.decoded(PLAN.encoded()) == PLAN
    assert " " not in PLAN.encoded()


def test_every_rank_has_its_place():
    told = [rank_environment(PLAN, node=n, local_rank=r) for n, host in enumerate(TWO) for r in range(len(host.slots))]
    assert [one["RANK"] for one in told] == ["0", "1", "2", "3", "4"]
    assert [one["LOCAL_RANK"] for one in told] == ["0", "1", "0", "1", "2"]
    assert {one["WORLD_SIZE"] for one in told} == {"5"} and {one["CROSS_SIZE"] for one in told} == {"2"}
    assert told[4]["LOCAL_WORLD_SIZE"] == "3" and told[4]["CUDA_VISIBLE_DEVICES"] == "0,1,2"
    assert (told[0]["MASTER_ADDR"], told[0]["MASTER_PORT"]) == ("10.0.0.1", "29500")
    assert told[0]["PYTHONPATH"].startswith(str(SHIM))


def test_cores_of_ranks():
    assert [cores_of(rank, ranks=2, cores=(1, 3, 4, 5, 7)) for rank in (0, 1)] == [(1, 3), (4, 5)]
    with pytest.raises(ValueError, match="3 ranks on 2 cores"):
        cores_of(0, ranks=3, cores=(0, 1))


# --local_rank


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("parser.add_argument('--lr')", None),
        ('parser.add_argument("--local_rank", type=int)', "--local_rank"),
        ("parser.add_argument('--local-rank', type=int)", "--local-rank"),
        ("@dataclass\nclass A:\n    local_rank: int = -1\n", "--local_rank"),
        ("x = os.environ['LOCAL_RANK']  # no --local_rank here", None),
        ("def broken(:", None),
    ],
)
def test_local_rank_goes_to_a_script_that_declares_it(tmp_path, text, word):
    script = tmp_path / "train.py"
    script.write_text(text)
    assert local_rank_word(str(script)) == word
    expected = [sys.executable, "-u", str(script), *([f"{word}=1"] if word else []), *PLAN.arguments]
    assert rank_command(replace(PLAN, script=str(script)), local_rank=1) == expected
    silent = rank_command(replace(PLAN, script=str(script), pass_local_rank=False), local_rank=1)
    assert silent == [sys.executable, "-u", str(script), *PLAN.arguments]


def test_arguments_may_be_declared_next_to_the_script(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("from options.parse import read\nimport train\n")
    (tmp_path / "options").mkdir()
    (tmp_path / "options" / "parse.py").write_text("add('--local_rank')")
    assert local_rank_word(str(tmp_path / "train.py")) == "--local_rank"
    monkeypatch.chdir(tmp_path)
    assert local_rank_word("options.parse", module=True) == "--local_rank"
    assert local_rank_word("options.none", module=True) is None
    assert rank_command(replace(PLAN, script="options.parse", module=True, arguments=()), local_rank=0) == (
        [sys.executable, "-u", "-m", "options.parse", "--local_rank=0"]
    )
    assert rank_command(replace(PLAN, script="bash", python=False, arguments=("-c",)), local_rank=0) == ["bash", "-c"]


# Other machines


def test_ssh_reaches_every_machine_but_this():
    plan = replace(PLAN, hosts=(Host(name="localhost", slots=("0",)), TWO[1]))
    found = reach(plan, launcher="ssh", options=["-v"], ssh_port=22, prepare="/v/activate")
    node = ("-m", "ztk.deepspeed.runner.node", plan.encoded())
    assert found.starts[0] == (sys.executable, "-u", *node, "0")
    assert found.starts[1][:5] == ("ssh", "-p", "22", "-v", "two")
    line = found.starts[1][5]
    assert line.endswith(f" && . /v/activate && exec {sys.executable} -u {' '.join(node)} 1")
    assert "export PYTHONPATH=" in line and "cd " in line
    assert found.stop == ((*found.starts[1][:5], f"pkill -TERM -f '[{plan.encoded()[0]}]{plan.encoded()[1:]}'"),)


def test_slurm_starts_one_task_per_machine():
    (command,) = reach(PLAN, launcher="slurm", options=["-v"], ssh_port=None).starts
    assert command[:-1] == (
        "srun",
        "-N",
        "2",
        "-n",
        "2",
        "--ntasks-per-node=1",
        "--nodelist=one,two",
        "-v",
        "bash",
        "-c",
    )
    assert command[-1].endswith(f"{PLAN.encoded()} $SLURMD_NODENAME")


def test_pdsh_is_ssh():
    assert read_options(["--launcher", "PDSH", "s.py"]).launcher == read_options(["s.py"]).launcher == "ssh"


def test_variables_that_go_with_the_run(tmp_path):
    file = tmp_path / ".deepspeed_env"
    file.write_text("# mine\nNCCL_IB_HCA=mlx5 0\n\nHF_HOME=/data\n")
    found = exported({"NCCL_IB_HCA": "old", "UCX_TLS": "tcp", "SECRET": "x"}, files=[file, tmp_path / "none"])
    assert {key: found[key] for key in found if key != "PYTHONPATH"} == {
        "NCCL_IB_HCA": "mlx5 0",
        "UCX_TLS": "tcp",
        "HF_HOME": "/data",
    }
    file.write_text("export A=1\n")
    with pytest.raises(ValueError, match="must look like NAME=value"):
        exported({}, files=[file])
