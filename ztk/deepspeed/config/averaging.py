"""How the ranks' gradients become one: `prescale_gradients`, `gradient_predivide_factor`, `gradient_allreduce_op`."""

from dataclasses import dataclass

from ztk.deepspeed.config.keys import Findings


@dataclass(frozen=True, kw_only=True, slots=True)
class Averaging:
    """mean: of the ranks, or their sum. prescales: divided by the number of ranks before they are added up, in their own dtype, where a sum
    may overflow; else by predivide before and by the rest after.
    """

    mean: bool = True
    prescales: bool = False
    predivide: float = 1.0

    def factor(self, ranks: int) -> float:
        """What each rank multiplies its gradients by before they are added up."""
        return 1.0 / ranks if self.prescales else 1.0 / self.predivide

    def divisor(self, ranks: int) -> float:
        """What the sum of the multiplied gradients is divided by."""
        return (ranks if self.mean else 1) * self.factor(ranks)


def read_averaging(top: dict, *, findings: Findings) -> Averaging:
    """top: the top-level values that take effect."""
    mean = top.get("gradient_allreduce_op", "mean") == "mean"
    prescales, predivide = top.get("prescale_gradients", False), top.get("gradient_predivide_factor", 1.0)
    if not mean and (prescales or predivide != 1.0):
        findings.notes.append(
            "prescale_gradients, gradient_predivide_factor: have no effect beside gradient_allreduce_op=sum, as in DeepSpeed"
        )
        prescales, predivide = False, 1.0
    elif prescales and predivide != 1.0:
        findings.notes.append("gradient_predivide_factor: has no effect beside prescale_gradients, as in DeepSpeed")
    return Averaging(mean=mean, prescales=prescales, predivide=predivide)
