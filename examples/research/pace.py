"""An own schedule and an own callback: `experiment=paced`."""


def stairs(step: int, every: int = 100, factor: float = 0.5) -> float:
    """The multiplier of the learning rate in a step, counted from 0: it falls by `factor` every `every` steps."""
    return factor ** (step // every)


class Patience:
    """Ends the run after `evaluations` validations without a smaller loss, and records how many there were."""

    def __init__(self, *, evaluations: int = 3) -> None:
        self.evaluations, self.best, self.worse = evaluations, float("inf"), 0

    def after_evaluation(self, loop, *, loss: float) -> None:
        self.worse = 0 if loss < self.best else self.worse + 1
        self.best = min(self.best, loss)
        loop.measured["patience.worse"] = self.worse
        if self.worse >= self.evaluations:
            loop.ended_by = f"{self.evaluations} validations without a smaller loss"
