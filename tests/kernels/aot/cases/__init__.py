"""What is compiled of each op, and its budgets: `CASES`, by the op's name."""

from tests.kernels.aot.case import AotCase
from tests.kernels.aot.cases import attention, elementwise, experts, inference, losses, norms, optimizers

CASES: dict[str, tuple[AotCase, ...]] = {
    **optimizers.CASES,
    **elementwise.CASES,
    **norms.CASES,
    **losses.CASES,
    **attention.CASES,
    **experts.CASES,
    **inference.CASES,
}
