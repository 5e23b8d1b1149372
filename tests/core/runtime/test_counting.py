"""The ledger, the clock and seeds."""

import time

import torch

from ztk.core.runtime import MemoryLedger, PhaseClock, Tier
from ztk.core.runtime.seed import derive_seed, generator


def test_ledger_adds_and_remembers_the_peak():
    ledger = MemoryLedger()
    ledger.add(tier=Tier.host, category="optimizer", nbytes=100)
    ledger.add(tier=Tier.host, category="pool", nbytes=50)
    ledger.remove(tier=Tier.host, category="optimizer", nbytes=100)
    ledger.add(tier=Tier.device, category="parameters", nbytes=7)
    assert ledger.current(Tier.host) == 50 and ledger.peak(Tier.host) == 150
    assert ledger.by_category(Tier.host) == {"pool": 50}
    assert ledger.current(Tier.device) == ledger.peak(Tier.device) == 7


def test_inner_phases_are_taken_off_outer_ones():
    clock = PhaseClock()
    start = time.perf_counter()
    with clock.phase("backward"):
        time.sleep(0.02)
        with clock.phase("communication"):
            time.sleep(0.03)
    total = time.perf_counter() - start
    assert clock.seconds["communication"] >= 0.03
    assert 0.02 <= clock.seconds["backward"] <= total - clock.seconds["communication"] + 1e-6
    assert sum(clock.seconds.values()) <= total


def test_seeds_depend_on_their_parts_only():
    assert derive_seed("a", 1) == derive_seed("a", 1) != derive_seed("a", 2)
    assert derive_seed("a1") != derive_seed("a", 1)
    first, again = (torch.rand(4, generator=generator("x", 0)) for _ in range(2))
    assert torch.equal(first, again)
