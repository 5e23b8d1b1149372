"""Collectives on flat tensors: the only package of ztk that communicates with other ranks."""

from ztk.runtime.comm.comm import Comm, Work
from ztk.runtime.comm.connect import connect, connect_groups
from ztk.runtime.comm.counters import CommCounters
from ztk.runtime.comm.errors import CommMismatch, PeerLost

__all__ = ["Comm", "CommCounters", "CommMismatch", "PeerLost", "Work", "connect", "connect_groups"]
