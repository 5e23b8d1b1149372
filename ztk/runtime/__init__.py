"""What a process has before any model: its place in the world, collectives, counted memory and counted time."""

from ztk.runtime.clock import PhaseClock
from ztk.runtime.comm import Comm, CommMismatch, PeerLost
from ztk.runtime.memory import MemoryLedger, Tier
from ztk.runtime.mesh import Mesh, Topology
from ztk.runtime.process import Process

__all__ = [
    "Comm",
    "CommMismatch",
    "MemoryLedger",
    "Mesh",
    "PeerLost",
    "PhaseClock",
    "Process",
    "Tier",
    "Topology",
]
