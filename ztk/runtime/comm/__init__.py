"""Collectives on flat tensors: the only place of the house that talks to other ranks."""

from ztk.runtime.comm.comm import Comm, Work
from ztk.runtime.comm.connect import connect, connect_groups
from ztk.runtime.comm.counters import CommCounters
from ztk.runtime.comm.errors import CommMismatch, PeerLost

__all__ = ["Comm", "CommCounters", "CommMismatch", "PeerLost", "Work", "connect", "connect_groups"]
