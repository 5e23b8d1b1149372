"""Two nodes on this machine: network namespaces with own addresses, host names, homes and disks, joined by a switch."""

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

NAMES = ("ztk-a", "ztk-b")
ADDRESSES = ("10.97.0.1", "10.97.0.2")
DISK_MEGABYTES = 256
_IP = shutil.which("ip") or "/usr/sbin/ip"
# In the namespaces of a node: its name, its own folder at the path that both nodes have, the names of both, then the command.
_ENTER = """
hostname "$NODE_NAME"
mount --make-rprivate /
mount --bind "$NODE_HOSTS" /etc/hosts
mount --bind "$NODE_DISK" "$NODE_OWN"
exec "$@"
"""


def missing() -> str:
    """Why this machine cannot have such nodes, or ""."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not all(shutil.which(name) for name in ("ip", "unshare", "mount", "hostname", "mkfs.ext4")):
        return "needs ip, unshare, mount, hostname and mkfs.ext4"
    name = f"ztkprobe{secrets.token_hex(2)}"
    commands = (
        (_IP, "netns", "add", name),
        (_IP, "-n", name, "link", "add", "veth0", "type", "veth", "peer", "name", "veth1"),
        (_IP, "-n", name, "link", "add", "switch", "type", "bridge"),
        ("unshare", "--uts", "--mount", "sh", "-c", "hostname probe && mount -t tmpfs none /mnt"),
    )
    faults = [done.stderr.strip() for done in map(_run, commands) if done.returncode]
    _run((_IP, "netns", "del", name))
    return f"the kernel refuses: {faults[0]}" if faults else ""


class Network:
    """`with Network(folder) as network: network.start(0, [...])`. The folder is shared, and `own` in it is each node's disk."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.own = folder, folder / "own"
        self._tag = secrets.token_hex(2)
        self._spaces = [f"ztk{self._tag}{letter}" for letter in "abs"]  # the last one has the switch
        self._processes: list[subprocess.Popen] = []
        self._disks = [folder / f"disk-{name}" for name in NAMES]

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    def _make(self) -> None:
        self.own.mkdir()
        hosts = "127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for a, n in zip(ADDRESSES, NAMES, strict=True))
        (self.folder / "hosts").write_text(hosts)
        for space in self._spaces:
            _check(_IP, "netns", "add", space)
            _check(_IP, "-n", space, "link", "set", "lo", "up")
        switch = self._spaces[2]
        _check(_IP, "-n", switch, "link", "add", "switch", "type", "bridge")
        _check(_IP, "-n", switch, "link", "set", "switch", "up")
        for node, address in enumerate(ADDRESSES):
            space, port = self._spaces[node], f"port{node}"
            _check(_IP, "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            _check(_IP, "-n", switch, "link", "set", port, "master", "switch", "up")
            _check(_IP, "-n", space, "address", "add", f"{address}/24", "dev", "eth0")
            _check(_IP, "-n", space, "link", "set", "eth0", "up")
            self._disks[node].mkdir()
            image = self.folder / f"{NAMES[node]}.img"  # not tmpfs, which offload refuses
            with image.open("wb") as file:
                file.truncate(DISK_MEGABYTES << 20)
            _check("mkfs.ext4", "-q", str(image))
            _check("mount", "-o", "loop", str(image), str(self._disks[node]))

    def _remove(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for node in range(len(NAMES)):
            self.kill(node)
        for process in self._processes:
            process.wait()
        for disk in self._disks:
            while _run(("umount", str(disk))).returncode == 0:
                pass
        for space in self._spaces:
            _run((_IP, "netns", "del", space))

    def disk(self, node: int) -> Path:
        """The folder of a node's disk, as this machine sees it."""
        return self._disks[node]

    def shell(self) -> Path:
        """A script in place of ssh: `SCRIPT NAME COMMAND` runs a shell's command on the node of this name."""
        script = self.folder / "shell"
        cases = [
            f"{name}) space={space}; export NODE_NAME={name} NODE_DISK={disk} ;;"
            for name, space, disk in zip(NAMES, self._spaces, self._disks, strict=False)
        ]
        script.write_text(
            "\n".join(
                [
                    "#!/bin/sh",
                    f'case "$1" in {" ".join(cases)} esac',
                    f"export NODE_HOSTS={self.folder / 'hosts'} NODE_OWN={self.own}",
                    "shift",
                    f"""exec {_IP} netns exec "$space" unshare --uts --mount sh -ec '{_ENTER}' node sh -c "$*"\n""",
                ]
            )
        )
        script.chmod(0o700)
        return script

    def start(
        self, node: int, command: Sequence[str], *, environment: Mapping[str, str], log: Path
    ) -> subprocess.Popen:
        """Starts a command on a node."""
        home = self._disks[node] / "home"
        home.mkdir(exist_ok=True)
        given = {
            "NODE_NAME": NAMES[node],
            "NODE_HOSTS": str(self.folder / "hosts"),
            "NODE_DISK": str(self._disks[node]),
            "NODE_OWN": str(self.own),
            "HOME": str(self.own / "home"),
            "TMPDIR": str(self.own),
        }
        enter = (_IP, "netns", "exec", self._spaces[node], "unshare", "--uts", "--mount", "sh", "-ec", _ENTER, "node")
        with log.open("a") as file:
            process = subprocess.Popen(
                [*enter, *command],
                env=os.environ | given | dict(environment),
                cwd=self.folder,
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
            )
        self._processes.append(process)
        return process

    def pids(self, node: int) -> list[int]:
        """Processes on a node."""
        return [int(word) for word in _run((_IP, "netns", "pids", self._spaces[node])).stdout.split()]

    def rank(self, node: int) -> int:
        """The process of the only rank of a node."""
        for pid in self.pids(node):
            try:
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if (
                any(word.startswith(b"RANK=") for word in words)
                and b"run.py" in line
                and b"distributed.run" not in line
            ):
                return pid
        raise AssertionError(f"{NAMES[node]} has no rank")

    def kill(self, node: int) -> None:
        """Ends all processes of a node at once, as a loss of power does."""
        for pid in self.pids(node):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def unplug(self, node: int) -> None:
        """Takes the node's cable out of the switch. The node's own interface stays configured."""
        _check(_IP, "-n", self._spaces[2], "link", "set", f"port{node}", "down")

    def plug(self, node: int) -> None:
        """Puts the cable back."""
        _check(_IP, "-n", self._spaces[2], "link", "set", f"port{node}", "up")


def wait_until(test, *, seconds: float, text) -> float:
    """Waits until `test()` is true. Returns the seconds. text: of an error."""
    started = time.monotonic()
    while not test():
        assert time.monotonic() - started < seconds, text()
        time.sleep(0.1)
    return time.monotonic() - started


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _check(*command: str) -> None:
    done = _run(command)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
