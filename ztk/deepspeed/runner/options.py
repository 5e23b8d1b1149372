"""The command line of `python -m ztk.deepspeed`, with DeepSpeed's names and meanings."""

import argparse
import re

from ztk.deepspeed.runner.remote import LAUNCHERS, NODE_VARIABLES

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
