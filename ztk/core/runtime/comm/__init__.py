"""Collectives on flat tensors: the only package of ztk that communicates with other ranks."""

from ztk.core.runtime.comm.comm import Comm, Work
from ztk.core.runtime.comm.connect import connect, connect_groups
from ztk.core.runtime.comm.counters import CommCounters
from ztk.core.runtime.comm.errors import CommMismatch, PeerLost

__all__ = ["Comm", "CommCounters", "CommMismatch", "PeerLost", "Work", "connect", "connect_groups"]
