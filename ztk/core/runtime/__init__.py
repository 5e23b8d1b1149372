"""The process without a model: rank and device, collectives, and counters of memory and time."""

from ztk.core.runtime.clock import PhaseClock
from ztk.core.runtime.comm import Comm, CommMismatch, PeerLost
from ztk.core.runtime.memory import MemoryLedger, Tier
from ztk.core.runtime.mesh import Mesh, Topology
from ztk.core.runtime.process import Process

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
