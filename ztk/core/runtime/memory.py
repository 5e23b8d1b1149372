"""Bytes per tier, counted where they are allocated.

The ledger is arithmetic, not a probe: code that allocates a long-lived buffer adds its bytes, code that frees it subtracts them.
The same numbers are printed, logged and asserted, so a claim about memory can be checked against the ZeRO formulas
(Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, section 5) to the byte.
"""

import threading
from collections import defaultdict

from ztk.core.policies.tier import Tier


class MemoryLedger:
    """Current and peak bytes per tier and category ("parameters", "gradients", "optimizer", "gathered", ...)."""

    def __init__(self) -> None:
        self._bytes: dict[Tier, dict[str, int]] = {tier: defaultdict(int) for tier in Tier}
        self._peak: dict[Tier, int] = dict.fromkeys(Tier, 0)
        self._at_peak: dict[Tier, dict[str, int]] = {tier: {} for tier in Tier}
        self._lock = threading.Lock()  # also used by I/O and communication threads

    def add(self, *, tier: Tier, category: str, nbytes: int) -> None:
        """Counts `nbytes` more on `tier` under `category`."""
        with self._lock:
            self._bytes[tier][category] += nbytes
            total = sum(self._bytes[tier].values())
            if total > self._peak[tier]:
                self._peak[tier], self._at_peak[tier] = total, dict(self._bytes[tier])

    def remove(self, *, tier: Tier, category: str, nbytes: int) -> None:
        """Counts `nbytes` less."""
        with self._lock:
            self._bytes[tier][category] -= nbytes
            assert self._bytes[tier][category] >= 0, f"{category} on {tier.label} freed more often than allocated"

    def current(self, tier: Tier) -> int:
        """Bytes on `tier` now."""
        with self._lock:
            return sum(self._bytes[tier].values())

    def peak(self, tier: Tier) -> int:
        """The most bytes on `tier` at one time."""
        return self._peak[tier]

    def by_category_at_peak(self, tier: Tier) -> dict[str, int]:
        """Bytes per category at the peak of `tier`, without zeros."""
        with self._lock:
            return {category: nbytes for category, nbytes in self._at_peak[tier].items() if nbytes}

    def by_category(self, tier: Tier) -> dict[str, int]:
        """Bytes per category on `tier` now, without zeros."""
        with self._lock:
            return {category: nbytes for category, nbytes in self._bytes[tier].items() if nbytes}
