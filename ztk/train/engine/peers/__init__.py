"""torch's own data parallelism (DDP and FSDP2) with the engine's interface, for comparisons on the same experiment."""

from ztk.train.engine.peers.build import parallelize_peer
from ztk.train.engine.peers.peer_engine import PeerEngine
from ztk.train.engine.peers.wrap import DataParallelPeer, FullyShardedPeer

__all__ = ["DataParallelPeer", "FullyShardedPeer", "PeerEngine", "parallelize_peer"]
