"""All combinations of stage, tier, precision, recompute mode and layout: two steps of each on tensors without values, as on a GPU.

    python scripts/check_combinations.py [--only TEXT] [--part 1/24]

They run on the model of streams of `tests/streams`. `tests/planner/test_combinations.py` runs a choice of them with every pair of values.
Exit code 1 if one fails, keeps states elsewhere, or uses memory without an order.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.planner.combinations import every, faults
from tests.planner.measure import planned
from tests.streams.model import modelled


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", help="combinations whose words contain this, such as 'tp2' or 'nvme fp16'"
    )
    parser.add_argument(
        "--part",
        default="1/1",
        metavar="I/N",
        help="the I-th of N parts of them, for several processes or short sittings",
    )
    options = parser.parse_args()
    number, parts = map(int, options.part.split("/"))
    rows = [row for row in every() if options.only in " ".join(map(str, row))][number - 1 :: parts]
    found, start = [], time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for row in rows:
            try:
                with modelled() as model:
                    found += faults([row], plan_of=lambda case: planned(case, folder=folder))
                found += [f"{row}: {race}" for race in model.races]
            except Exception as error:  # noqa: BLE001  # a combination that fails is what this looks for
                found.append(f"{row}: {type(error).__name__}: {error}")
    for fault in found:
        print(fault)
    print(f"{len(rows)} combinations, {len(found)} faults, {time.perf_counter() - start:.0f} s")
    return 1 if found or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
