"""A schedule as a table: one row per rank, one column per unit of time."""

from ztk.pipeline.schedule import Schedule
from ztk.pipeline.simulate import Costs


def as_table(schedule: Schedule, *, costs: Costs | None = None) -> str:
    """A drawing of what every rank computes when, at integer `costs` (default: 1 for each kind). A cell is kind, micro-batch and, with several
    stages per rank, the stage's number on its rank as a letter; dots are the bubble."""
    timeline = schedule.timeline(costs)
    several = schedule.num_stages > schedule.num_ranks
    length = round(timeline.length)
    rows = [["."] * length for _ in range(schedule.num_ranks)]
    for interval in timeline.intervals:
        chunk = chr(ord("a") + interval.action.stage // schedule.num_ranks) if several else ""
        cell = f"{interval.action.kind}{interval.action.micro_batch}{chunk}"
        for slot in range(round(interval.start), round(interval.stop)):
            rows[interval.rank][slot] = cell
    width = max(len(cell) for row in rows for cell in row)
    header = (
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_micro_batches} micro-batches, idle {timeline.idle_share:.1%}"
    )
    lines = [f"rank {rank}  " + " ".join(cell.ljust(width) for cell in row) for rank, row in enumerate(rows)]
    return "\n".join([header, *(line.rstrip() for line in lines)])
