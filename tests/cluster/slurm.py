"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmds, each with its own host name."""

import os
import platform
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).resolve().parents[2]
NODES = ("ztk-n0", "ztk-n1")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "unshare")
_CONF = """
ClusterName=ztk
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=30
JobRequeue=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=2000
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=2000
PartitionName=low Nodes={nodes[0]},{nodes[1]} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60 PreemptMode=REQUEUE
PartitionName=high Nodes={nodes[0]},{nodes[1]} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """Why this machine cannot have the cluster, or ""."""
    if absent := [program for program in _PROGRAMS if shutil.which(program) is None]:
        return f"needs {', '.join(absent)} (Debian: apt-get install slurm-wlm munge)"
    if os.geteuid():
        return "needs root: slurmd starts tasks of users, and each node has a name space of host names"
    if subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True, check=False).returncode:
        return "needs a kernel that makes name spaces of host names (unshare --uts --mount)"
    return ""


class Cluster:
    """Context with a running cluster. environment: for commands of its users. log: output of all daemons."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ztk-slurm-"))
        self.log = self.folder / "daemons.log"
        self.environment = os.environ | {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PYTHONPATH": str(ROOT),
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
        }
        self._daemons: list[subprocess.Popen] = []

    def __enter__(self) -> Self:
        folder, host = self.folder, platform.node().partition(".")[0]
        for name in ("state", "spool"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        hosts = folder / "hosts"
        hosts.write_text(f"127.0.0.1 localhost {host} {' '.join(NODES)}\n")
        conf = folder / "slurm.conf"
        conf.write_text(_CONF.format(host=host, folder=folder, nodes=NODES, ports=_free_ports(3)))
        try:
            files = [
                f"--{name}={folder}/munge.{name.partition('-')[0]}"
                for name in ("key-file", "socket", "pid-file", "seed-file")
            ]
            self._start("munged", "--foreground", "--force", *files, f"--log-file={folder}/munge.log")
            self._wait_for((folder / "munge.socket").exists, seconds=20)
            self._start("slurmctld", "-D", "-i")
            for node in NODES:
                enter = f"mount --bind {hosts} /etc/hosts && hostname {node} && exec slurmd -D -N {node}"
                self._start("unshare", "--uts", "--mount", "sh", "-c", enter)
            self._wait_for(
                lambda: self.run("sinfo", "-h", "-N", "-p", "low", "-o", "%T").stdout.split() == ["idle"] * 2,
                seconds=60,
            )
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if len(self._daemons) > 1:
            self.run("scancel", "--user=root", "--signal=KILL", "--full")
            self.run("scancel", "--user=root")
            end = time.monotonic() + 30
            while self.run("squeue", "-h").stdout.strip() and time.monotonic() < end:
                time.sleep(0.5)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """A command of a user of the cluster, to its end."""
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=120, check=False, cwd=cwd
        )

    def submit(self, *words: str, cwd: Path) -> str:
        """Runs `python run.py launch=slurm WORDS` and returns the job's number."""
        done = self.run(sys.executable, str(ROOT / "run.py"), "launch=slurm", *words, cwd=cwd)
        found = re.search(r"submitted job (\d+)", done.stderr)
        assert done.returncode == 0, done.stderr
        assert found is not None, done.stderr
        return found[1]

    def state(self, job: str) -> str:
        """The state of a job, such as RUNNING."""
        return self._field(job, name="JobState")

    def restarts(self, job: str) -> int:
        """How often a job was requeued."""
        return int(self._field(job, name="Restarts"))

    def start_again(self, job: str) -> None:
        """Starts a requeued job now, which Slurm would delay by two minutes."""
        self._wait_for(lambda: self.state(job) == "PENDING", seconds=60)
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        self._wait_for(lambda: self.state(job) != "PENDING", seconds=60)

    def wait_for_end(self, job: str, *, seconds: float) -> str:
        """The state in which a job has ended, or PENDING after a requeue."""
        self._wait_for(lambda: self.state(job) != "PENDING", seconds=seconds)
        self._wait_for(lambda: self.state(job) not in ("RUNNING", "COMPLETING"), seconds=seconds)
        if self.state(job) == "FAILED":
            time.sleep(3)  # the shell of a job that requeues itself ends with its code before the job is PENDING
        return self.state(job)

    def _field(self, job: str, *, name: str) -> str:
        shown = self.run("scontrol", "show", "job", job).stdout
        found = re.search(rf"\b{name}=(\S+)", shown)
        return found[1] if found else ""

    def _start(self, *command: str) -> None:
        with self.log.open("a") as log:
            self._daemons.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))

    def _wait_for(self, is_so, *, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < end, self.log.read_text()[-4000:]
            time.sleep(0.3)


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
