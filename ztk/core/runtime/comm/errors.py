"""Errors of communication between ranks."""


class PeerLost(RuntimeError):
    """Another rank is gone. Never the first cause: the lost rank's own error is."""


class CommMismatch(RuntimeError):
    """Two ranks called different collectives at the same time: they ran different modules, shapes or orders."""


class peer_errors:
    """Turns gloo's connection errors into `PeerLost`, which is never shown as the first cause."""

    def __init__(self, label: str) -> None:
        self._label = label

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, PeerLost):
            raise PeerLost(f"{self._label}: {error}") from error
