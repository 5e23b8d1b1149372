"""500 random scripts on an engine with two ranks equal plain PyTorch, or end in an error of ztk's.

tests/deepspeed/test_random_scripts.py runs some of the seeds, and the scripts that find planted faults.
"""

import collections

from tests.deepspeed.random_runs import Result, run_engine, script_of
from tests.ranks import RankFailed


def test_a_random_script_equals_plain_pytorch_or_ends_in_an_error_of_ztk(ranks, show, amount):
    faults, counts, of_edits = [], collections.Counter(), collections.defaultdict(collections.Counter)
    for seed in range(amount(500)):
        try:
            result = Result.of(ranks(2).run(run_engine, seed=seed))
        except RankFailed as failure:
            result = Result("failed", str(failure)[-700:], False)
        counts[result.kind] += 1
        if result.is_reached:
            of_edits[script_of(seed).edit.kind][result.kind] += 1
        if result.kind in ("failed", "raw", "differs"):
            faults.append(f"seed {seed}: {result.kind} {result.text}\n    {script_of(seed)}")
    for kind, of_kind in (*sorted(of_edits.items()), ("all", counts)):
        show(f"{kind}: {', '.join(f'{count} {result}' for result, count in of_kind.most_common())}")
    assert not faults, "\n".join(faults)
