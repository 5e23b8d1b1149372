"""`CASES`: the kernels that are compiled of each op, with their budgets, by the op's name."""

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
