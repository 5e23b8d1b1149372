"""The complete run: from the options to a plan, and from the plan to the ranks' exit codes."""

import argparse
import os
import re
import shlex
import socket
import subprocess
import sys
import uuid
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ztk.core.launch import Child, first_cause, python_path, run_children
from ztk.deepspeed.names.tree import module_of
from ztk.deepspeed.runner import hosts as where
from ztk.deepspeed.runner import remote
from ztk.deepspeed.runner.hosts import Host
from ztk.deepspeed.runner.node import Plan, run_node
from ztk.deepspeed.runner.remote import LAUNCHERS, NODE_VARIABLES, Reach, address_of, check_launcher, is_local, reach

_PORT = 29500


def run(arguments: list[str]) -> int:
    """Returns the exit code of the script's first failed rank, 0 if all succeeded, or 2 if nothing could be started."""
    options = read_options(arguments)
    try:
        chosen, listed = choose_hosts(options)
        by_hand = options.no_ssh
        many = not by_hand and (len(chosen) > 1 or options.force_multi)
        launcher = options.launcher if many else None
        if launcher is not None:
            check_launcher(launcher)
        plan = make_plan(options, hosts=chosen, launcher=launcher, alone=not many and not (by_hand and listed))
    except (ValueError, OSError) as error:
        print(f"[ztk] {error}", file=sys.stderr)
        return 2
    if not plan.quiet:
        place = ", ".join(f"{host.name}: {len(host.slots)}" for host in chosen)
        print(
            f"[ztk] {plan.world_size} ranks ({place}) rendezvous at {plan.master_addr}:{plan.master_port}",
            file=sys.stderr,
        )
    if launcher is None:
        return run_node(plan, node=options.node_rank or 0)
    return _run_everywhere(plan, options=options, launcher=launcher)


def choose_hosts(options: Namespace) -> tuple[list[Host], bool]:
    """Returns the machines with their devices, and whether a hostfile lists them. Raises ValueError for unknown machines or devices."""
    listed = Path(options.hostfile).is_file()
    if not listed and options.hostfile != HOSTFILE:
        raise ValueError(f"--hostfile={options.hostfile}: there is no such file")
    if listed:
        hosts = where.filtered(where.read_hostfile(options.hostfile), include=options.include, exclude=options.exclude)
        hosts = where.first(hosts, num_nodes=options.num_nodes, num_gpus=options.num_gpus)
    elif options.num_nodes not in (None, 1):
        raise ValueError(f"--num_nodes={options.num_nodes}: list the machines in a hostfile, --hostfile=FILE")
    elif options.include or options.exclude:
        hosts = where.filtered([where.all_of_this_machine()], include=options.include, exclude=options.exclude)
    else:
        hosts = [where.this_machine(num_gpus=options.num_gpus)]
    if options.node_rank is not None and not 0 <= options.node_rank < len(hosts):
        raise ValueError(f"--node_rank={options.node_rank}: must be from 0 to {len(hosts) - 1}")
    return hosts, listed


def make_plan(options: Namespace, *, hosts: list[Host], launcher: str | None, alone: bool) -> Plan:
    """Builds the plan. alone: all ranks are on this machine. Raises ValueError if the script does not exist."""
    if not options.no_python and not options.module and not Path(options.script).is_file():
        raise ValueError(f"{options.script}: there is no such file")
    if alone or all(is_local(host) for host in hosts):
        address = options.master_addr or "127.0.0.1"
    elif options.master_addr:
        address = options.master_addr
    elif options.no_ssh and not is_local(hosts[0]):
        address = hosts[0].name
    else:
        address = address_of(hosts[0], launcher=options.launcher, ssh_port=options.ssh_port)
    return Plan(
        hosts=tuple(hosts),
        master_addr=address,
        master_port=options.master_port or (_free_port() if alone else _PORT),
        script=options.script,
        arguments=options.arguments,
        module=options.module,
        python=not options.no_python,
        pass_local_rank=not options.no_local_rank,
        log_folder=options.enable_each_rank_log,
        bind_cores=options.bind_cores_to_rank,
        cores=options.bind_core_list,
        quiet=options.quiet or options.log_level in ("error", "critical", "warning"),
        run_id=uuid.uuid4().hex,
    )


def _run_everywhere(plan: Plan, *, options: Namespace, launcher: str) -> int:
    """Starts one child per connection. The first machine that fails stops all."""
    connections = reach(
        plan,
        launcher=launcher,
        options=shlex.split(options.launcher_args),
        ssh_port=options.ssh_port,
        prepare=options.venv_script,
    )
    if launcher == "ssh" and not options.no_ssh_check:
        for host in plan.hosts:
            if not is_local(host) and not _answers(host, ssh_port=options.ssh_port):
                print(
                    f"[ztk] {host.name} is not reached by ssh without a password; set it up, or take it out",
                    file=sys.stderr,
                )
                return 2
    environment = os.environ | {"PYTHONPATH": python_path()}
    children = [
        Child(rank=number, command=command, environment=environment)
        for number, command in enumerate(connections.starts)
    ]
    ended_well = False
    try:
        failures = run_children(children)
        ended_well = not failures
    finally:
        if not ended_well:
            _stop_remote(connections)
    if not failures:
        return 0
    cause = first_cause(failures)
    place = plan.hosts[cause.rank].name if len(children) == len(plan.hosts) else launcher
    print(f"[ztk] {place} {cause.message}; all machines were stopped", file=sys.stderr)
    return cause.code


def _stop_remote(connections: Reach) -> None:
    for command in connections.stop:
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=15)


def _answers(host: Host, *, ssh_port: int | None) -> bool:
    port = [] if ssh_port is None else ["-p", str(ssh_port)]
    command = ["ssh", "-o", "PasswordAuthentication=no", *port, host.name, "hostname"]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main(args: Sequence[str] | None = None) -> None:
    """The command: `python -m ztk.deepspeed ARGS`, and `deepspeed.launcher.runner.main` for other programs' commands.

    args: defaults to this process's. Raises SystemExit with the code of a failure.
    """
    remote.EXPORT_ENVS[:] = list(
        module_of("deepspeed.launcher.runner").EXPORT_ENVS
    )  # a program may have changed it there
    code = run(list(sys.argv[1:] if args is None else args))
    if code:
        raise SystemExit(code)


# The command line of `python -m ztk.deepspeed`, with DeepSpeed's names and meanings.

HOSTFILE = "/job/hostfile"
_ABSENT = {
    "--autotuning": "ztk has no autotuner for scripts; run.py tries several values by `python run.py -m key=a,b`",
    "--save_pid": "use the process id of this command",
}


def read_options(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line. Returns values by the names of `_parser`, None if not given, and `script` with its `arguments`.

    Ends the program with a message for an invalid line, as argparse does.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    given = vars(options)
    for name, instead in _ABSENT.items():
        if given[name.lstrip("-")]:
            parser.error(f"{name} is not offered: {instead}")
    if given["no_python"] and given["module"]:
        parser.error("--no_python and --module: a module is run by python; leave one of them out")
    if (given["num_nodes"] or given["num_gpus"]) and (given["include"] or given["exclude"]):
        parser.error("--num_nodes and --num_gpus exclude --include and --exclude; use one of the ways")
    if given["no_ssh"] and given["node_rank"] is None:
        parser.error("--no_ssh: every machine is started by hand; give this machine's number with --node_rank")
    if given["node_rank"] is not None and not given["no_ssh"]:
        parser.error("--node_rank: has no effect without --no_ssh")
    if given["bind_core_list"] and not given["bind_cores_to_rank"]:
        parser.error("--bind_core_list: has no effect without --bind_cores_to_rank")
    options.arguments = tuple(options.arguments)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ztk.deepspeed", description="Starts a DeepSpeed script; `import deepspeed` in it is ztk."
    )
    add = parser.add_argument
    add("-H", "--hostfile", default=HOSTFILE, help="lines `worker-0 slots=4`; without the file: this machine")
    add("-i", "--include", default="", help="machines and devices to use: `worker-0@worker-1:0,2`")
    add("-e", "--exclude", default="", help="machines and devices not to use, in the same form")
    add("--num_nodes", type=_count, help="the first N machines of the hostfile")
    add("--num_gpus", "--num_accelerators", type=_count, help="the first N devices of each; without GPUs: N ranks")
    add("--master_addr", help="where rank 0 listens (default: found out)")
    add("--master_port", type=int, help="its port (default: 29500, on one machine a free one)")
    add("--node_rank", type=int, help="with --no_ssh: which machine of the hostfile this is")
    add("--launcher", type=_launcher, choices=LAUNCHERS, default="ssh", help="pdsh, DeepSpeed's default, is ssh")
    add("--launcher_args", default="", help="options of the launcher itself, as one text")
    add("--module", action="store_true", help="the script is a module: python -m")
    add("--no_python", action="store_true", help="the script is run as it is, without python")
    add("--no_local_rank", action="store_true", help="never pass --local_rank, even to a script that knows it")
    add("--no_ssh", action="store_true", help="start this machine's ranks alone; the others are started by hand")
    add("--no_ssh_check", action="store_true", help="do not try the connection first")
    add("--force_multi", action="store_true", help="one machine is reached by the launcher, too")
    add("--enable_each_rank_log", metavar="FOLDER", help="every rank writes its own file there")
    add("--bind_cores_to_rank", action="store_true", help="every rank runs on its own cores")
    add("--bind_core_list", type=_cores, help="of these: 1,3-5,7")
    add("--ssh_port", type=int)
    add("--venv_script", help="sourced on other machines first")
    add("--log_level", default="info", choices=("debug", "info", "warning", "error", "critical"))
    add("-q", "--quiet", action="store_true", help="errors alone")
    add("--autotuning", help=argparse.SUPPRESS)
    add("--save_pid", action="store_true", help=argparse.SUPPRESS)
    add("script")
    add("arguments", nargs=argparse.REMAINDER)
    return parser


def _launcher(text: str) -> str:
    """Parses the launcher. pdsh means ssh. For other launchers, the error has the command of their tasks."""
    name = text.lower()
    if name in NODE_VARIABLES:
        raise argparse.ArgumentTypeError(
            f"{name} is not offered: let it start one task per machine, `python -m ztk.deepspeed --hostfile=FILE --no_ssh "
            f"--node_rank=${NODE_VARIABLES[name]} SCRIPT`"
        )
    return "ssh" if name == "pdsh" else name


def _count(text: str) -> int | None:
    """Parses a count. -1, DeepSpeed's default, means not given."""
    if int(text) == -1:
        return None
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return int(text)


def _cores(text: str) -> tuple[int, ...]:
    cores: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise argparse.ArgumentTypeError(f"{part!r} must be a number or a range such as 3-5")
        cores += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(dict.fromkeys(cores))
