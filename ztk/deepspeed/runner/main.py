"""The complete run: from the options to a plan, and from the plan to the ranks' exit codes."""

import os
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
from ztk.deepspeed.runner.options import HOSTFILE, read_options
from ztk.deepspeed.runner.remote import Reach, address_of, check_launcher, is_local, reach

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
