"""The batch triple: any two give the third."""

from dataclasses import dataclass

from ztk.deepspeed.config.keys import Findings, takes, whole_number

KEYS = {
    "train_batch_size": takes(whole_number(1)),
    "train_micro_batch_size_per_gpu": takes(whole_number(1)),
    "gradient_accumulation_steps": takes(whole_number(1)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizes:
    """train = micro * accumulation * ranks, in samples."""

    train: int
    micro: int
    accumulation: int


def solve_batch(values: dict, *, world_size: int, findings: Findings) -> BatchSizes | None:
    """The three sizes, or None and a fault. world_size: ranks that compute on different data."""
    train, micro, accumulation = (values.get(name) for name in KEYS)
    given = ", ".join(f"{name}={values[name]}" for name in KEYS if name in values)
    if train is None and micro is None:
        extra = f" ({given} alone does not say it)" if given else ""
        findings.faults.append(
            f"train_batch_size: give it or train_micro_batch_size_per_gpu{extra}; the third of the triple follows"
        )
        return None
    if train is None:
        accumulation = accumulation or 1
        return BatchSizes(train=micro * accumulation * world_size, micro=micro, accumulation=accumulation)
    if micro is None:
        accumulation = accumulation or 1
        micro = train // (world_size * accumulation)
    elif accumulation is None:
        accumulation = train // (world_size * micro)
    if not micro or not accumulation or train != micro * accumulation * world_size:
        unit = world_size * (values.get("train_micro_batch_size_per_gpu") or 1)
        unit *= values.get("gradient_accumulation_steps") or 1
        all_given = all(name in values for name in KEYS)
        near = unit if all_given else max(unit, round(train / unit) * unit)
        findings.faults.append(
            f"{given} on {world_size} rank{'s' if world_size > 1 else ''}: train_batch_size must be "
            f"train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks; train_batch_size={near} would fit"
        )
        return None
    return BatchSizes(train=train, micro=micro, accumulation=accumulation)
