"""25 families of transformers in 8 strategies: losses equal plain transformers and torch's AdamW on one rank, or the choice is refused.

200 cells on two ranks, about 6 minutes on 2 cores. A cell is the largest relative difference of a loss over four steps in fp32; with LoRA the
reference is peft. The bound is 1e-5. A refusal comes before ranks start and names the fix. docs/huggingface.md has the table.
"""

import re
from pathlib import Path

import pytest

from tests.hf.cells import COLUMNS, RANKS, run_cell
from tests.parallel.topology.families import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_in_every_strategy_or_is_refused(ranks, show, tmp_path: Path, family: str):
    cells, refusals, faults = [], {}, []
    for column in COLUMNS:
        found = run_cell(ranks(RANKS), family=family, column=column, folder=tmp_path / column)
        if not found.holds:
            faults.append(f"{column}: {found}")
        if found.deviation is None:
            text = re.sub(r"of type \w+", "of type TYPE", found.refusal.replace(str(tmp_path / column), "FOLDER"))
            refusals.setdefault(text, []).append(column)
        cells.append(f"{found.deviation:.0e}" if found.deviation is not None else "refused")
    show(f"| {family} | {' | '.join(cells)} |")
    for text, columns in refusals.items():
        show(f"    {', '.join(columns)}: {text}")
    assert not faults
