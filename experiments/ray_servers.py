"""Servers of `rollout.servers=[ray,ray]`: child processes of Ray actors, which Ray places and restarts.

An actor starts `task=serve` on a free port of its machine and writes the address into a file of the run folder, which every rank of the
trainer reads. If the server ends, the actor ends, too, and Ray starts another one: on the same machine or elsewhere, with the model's first
weights and another address. The trainer then sends it the newest weights, as to any server that restarts.
"""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ztk.core.launch import Child, python_path, start_process
from ztk.core.policies.ending import ENDING
from ztk.core.policies.records import replace_file
from ztk.core.policies.rollout import PLACED

_ANSWERS = re.compile(r"answers on (https?://\S+)")
_POLL_SECONDS, _PAUSE_SECONDS = 0.1, 1.0  # between looks at a server that starts; before another one starts
# Variables of a trainer's rank, which a Ray that it has started inherits.
_OF_RANKS = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_")
_LAST_WORDS = 2000  # characters of a server's output in an error


class ServerActor:
    """Runs in a worker of Ray. Ray calls the constructor again when it restarts the actor."""

    def __init__(self, words: Sequence[str], *, folder: str, environment: dict[str, str]) -> None:
        """words: options of the server. folder: for its output and the file with its address; the ranks of the trainer see it."""
        import ray

        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        address_file(self._folder).unlink(missing_ok=True)
        number = len(list(self._folder.glob("*.log")))
        self._log, host = self._folder / f"{number}.log", ray.util.get_node_ip_address()
        own = (
            f"serve.host={host}",
            f"serve.weights_path={self._folder}/weights",
            f"hydra.run.dir={self._folder}/{number}",
        )
        command = [sys.executable, "-m", "ztk", "task=serve", *words, *own]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OF_RANKS)}
        with self._log.open("w", encoding="utf-8") as file:
            child = Child(rank=0, command=command, environment=inherited | environment)
            self._process = start_process(child, log=file)
        threading.Thread(target=self._watch, name="ztk-server", daemon=True).start()

    def _watch(self) -> None:
        """Writes the address as soon as the server answers, and ends this process after the server."""
        is_written = False
        while self._process.poll() is None:
            if not is_written and (found := _ANSWERS.search(self._log.read_text(errors="replace"))) is not None:
                _write(self._folder, url=found[1])
                is_written = True
            time.sleep(_POLL_SECONDS)
        error = f"the server of Ray ended with code {self._process.returncode}: {self._log.read_text(errors='replace')[-_LAST_WORDS:]}"
        _write(self._folder, error=error)
        time.sleep(_PAUSE_SECONDS)
        os._exit(1)  # another end would be final for Ray


class RayServers:
    """The servers of a run, which end with `close` or with this process. On rank 0."""

    def __init__(
        self, folders: Sequence[Path], *, words: Sequence[str], environment: dict[str, str], device: str
    ) -> None:
        """folders: one per server. words: options of all servers. environment: their further variables. device: cuda for a GPU each.

        Ray is the cluster of RAY_ADDRESS, the one that runs on this machine, or a new one on this machine.
        """
        import ray

        self._is_own = not ray.is_initialized()
        if self._is_own:
            handlers = {kind: signal.getsignal(kind) for kind in ENDING}
            ray.init(log_to_driver=False, configure_logging=False)
            for kind, handler in handlers.items():  # Ray's own for SIGTERM ends the rank before it has saved
                signal.signal(kind, handler)
        options = {
            "num_cpus": 1,
            "num_gpus": 1 if device == "cuda" else 0,
            "max_restarts": -1,
            "runtime_env": {"env_vars": {"PYTHONPATH": python_path()}},
        }
        actor = ray.remote(ServerActor).options(**options)
        self._actors: list[Any] = [
            actor.remote(list(words), folder=str(folder), environment=environment) for folder in folders
        ]

    def close(self) -> None:
        """Ends the servers and the connection. Idempotent."""
        import ray

        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors = []
        if self._is_own and ray.is_initialized():
            ray.shutdown()


def address_file(folder: Path) -> Path:
    """The file with the address of the server of a folder."""
    return folder / "address.json"


def finder(folder: Path) -> Callable[[], str]:
    """Returns a function that returns the address of a server now. It raises ConnectionError while there is none."""

    def find() -> str:
        try:
            found = json.loads(address_file(folder).read_text())
        except (OSError, ValueError):
            raise ConnectionError("Ray has not placed it, or it has not started; see `ray status`") from None
        if "url" not in found:
            raise ConnectionError(found["error"])
        return found["url"]

    return find


def placed(servers: Sequence[str], *, folder: Path) -> dict[int, Path]:
    """The folders of the servers that Ray places, by their place in `rollout.servers`."""
    return {number: folder / str(number) for number, name in enumerate(servers) if name == PLACED}


def _write(folder: Path, **values: str) -> None:
    replace_file(address_file(folder), text=json.dumps(values))
