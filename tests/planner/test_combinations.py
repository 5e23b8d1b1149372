"""Every pair of stage, tier, precision, recompute mode and layout runs two steps on tensors without values, as on a GPU.

The steps run on a model of streams, so every use of a buffer is checked to be ordered behind the one before it.
"""

from tests.planner.combinations import VALUES, case_of, every, faults, pairs
from tests.planner.measure import planned
from tests.streams.model import modelled
from ztk.planner import Plan


def test_every_pair_of_choices_runs(tmp_path):
    with modelled() as model:
        assert not faults(pairs(), plan_of=lambda case: planned(case, folder=str(tmp_path)))
    assert not model.races and model.checked > 200_000


def test_pairs_are_complete_and_few():
    """All combinations are run by `scripts/check_combinations.py`."""
    chosen, names = pairs(), list(VALUES)
    assert len(chosen) < 60 < 1512 == len(every())
    for i, first in enumerate(names):
        for j, second in enumerate(names[:i]):
            found = {(row[i], row[j]) for row in chosen}
            assert len(found) == len(VALUES[first]) * len(VALUES[second])


def test_states_on_another_tier_are_noticed(tmp_path):
    row = ("dp2", 1, "cpu", "fp32", "none")

    def elsewhere(case) -> Plan:
        return planned(case_of(("dp2", 1, "none", "fp32", "none")), folder=str(tmp_path))

    assert len(faults([row], plan_of=elsewhere)) == 1
