"""The batch sizes, any two of which determine the third, and the averaging of gradients over ranks."""

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
    """Returns the three sizes, or None and adds a fault. world_size: number of ranks with different data."""
    train, micro, accumulation = (values.get(name) for name in KEYS)
    given = ", ".join(f"{name}={values[name]}" for name in KEYS if name in values)
    if train is None and micro is None:
        extra = f" ({given} alone is not enough)" if given else ""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Averaging:
    """mean: averages over the ranks instead of adding up.
    prescales: divides by the number of ranks before the reduction, in the gradients' dtype, in which a sum might overflow. Otherwise
    divides by predivide before and by the rest after the reduction.
    """

    mean: bool = True
    prescales: bool = False
    predivide: float = 1.0

    def factor(self, ranks: int) -> float:
        """Returns the factor on each rank's gradients before the reduction."""
        return 1.0 / ranks if self.prescales else 1.0 / self.predivide

    def divisor(self, ranks: int) -> float:
        """Returns the divisor of the sum of the scaled gradients."""
        return (ranks if self.mean else 1) * self.factor(ranks)


def read_averaging(top: dict, *, findings: Findings) -> Averaging:
    """Reads the averaging keys. top: the effective top-level values."""
    mean = top.get("gradient_allreduce_op", "mean") == "mean"
    prescales, predivide = top.get("prescale_gradients", False), top.get("gradient_predivide_factor", 1.0)
    if not mean and (prescales or predivide != 1.0):
        findings.notes.append(
            "prescale_gradients, gradient_predivide_factor: have no effect with gradient_allreduce_op=sum, as in DeepSpeed"
        )
        prescales, predivide = False, 1.0
    elif prescales and predivide != 1.0:
        findings.notes.append("gradient_predivide_factor: has no effect with prescale_gradients, as in DeepSpeed")
    return Averaging(mean=mean, prescales=prescales, predivide=predivide)
