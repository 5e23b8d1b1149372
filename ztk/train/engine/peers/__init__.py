"""torch's own ways to train data-parallel, behind the engine's surface: the same experiment, for comparison."""

from ztk.train.engine.peers.build import parallelize_peer
from ztk.train.engine.peers.engine import PeerEngine
from ztk.train.engine.peers.wrap import DataParallelPeer, FullyShardedPeer

__all__ = ["DataParallelPeer", "FullyShardedPeer", "PeerEngine", "parallelize_peer"]
