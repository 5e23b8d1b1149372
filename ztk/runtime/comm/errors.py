"""What can go wrong between ranks."""


class PeerLost(RuntimeError):
    """Another rank is gone. Never the first cause: that rank's own error is."""


class CommMismatch(RuntimeError):
    """Two ranks met in different collectives: they ran different modules, shapes or orders."""
