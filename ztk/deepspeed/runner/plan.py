"""What every machine of a run is told: who takes part, where rank 0 listens, and what each rank runs."""

import base64
import dataclasses
import json
from dataclasses import dataclass

from ztk.deepspeed.runner.hosts import Host


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One run of one script.

    script: a path, a module's name if `module`, or any command if not `python`. pass_local_rank: as an argument, to a script that
    knows it. log_folder: one file per rank instead of the terminal. bind_cores: every rank runs on its own part of `cores` (None: of all).
    run_id: a word that no other run has.
    """

    hosts: tuple[Host, ...]
    master_addr: str
    master_port: int
    script: str
    arguments: tuple[str, ...]
    module: bool
    python: bool
    pass_local_rank: bool
    log_folder: str | None
    bind_cores: bool
    cores: tuple[int, ...] | None
    quiet: bool
    run_id: str

    @property
    def world_size(self) -> int:
        """Ranks on all machines."""
        return sum(len(host.slots) for host in self.hosts)

    def first_rank_of(self, node: int) -> int:
        """Ranks are numbered machine by machine."""
        return sum(len(host.slots) for host in self.hosts[:node])

    def encoded(self) -> str:
        """One word of a command line."""
        return base64.urlsafe_b64encode(json.dumps(dataclasses.asdict(self)).encode()).decode()

    @staticmethod
    def decoded(word: str) -> "Plan":
        """The plan that `encoded` made the word of."""
        values = json.loads(base64.urlsafe_b64decode(word))
        hosts = tuple(Host(name=host["name"], slots=tuple(host["slots"])) for host in values.pop("hosts"))
        tuples = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
        return Plan(hosts=hosts, **(values | tuples))
