"""The price of a planned training: GPU hours and days for a number of tokens, and the tokens that a budget of GPU hours trains."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ztk.planner.result import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """tokens: number in the whole training, if given. budget_hours: GPU hours that it may take, if given."""

    tokens: float | None = None
    budget_hours: float | None = None

    def row(self, plan: Plan) -> dict[str, Any]:
        """Flat keys and plain numbers, as far as known: `gpu_hours` and `days` of `tokens`, `within_budget`, `budget_tokens`."""
        rate = plan.tokens_per_second_per_gpu
        if not rate:
            return {}
        found: dict[str, Any] = {}
        if self.tokens is not None:
            hours = self.tokens / rate / 3600
            found |= {"gpu_hours": hours, "days": hours / plan.world_size / 24}
            if self.budget_hours is not None:
                found["within_budget"] = hours <= self.budget_hours
        if self.budget_hours is not None:
            found["budget_tokens"] = self.budget_hours * 3600 * rate
        return found

    def lines(self, plan: Plan) -> Iterator[str]:
        """The price as lines of text."""
        row, ranks = self.row(plan), plan.world_size
        if "gpu_hours" in row:
            yield f"  {self.tokens:.4g} tokens take {row['gpu_hours']:,.0f} GPU hours, {row['days']:.3g} days on {ranks:,} GPUs"
        if self.budget_hours is None or "budget_tokens" not in row:
            return
        days = self.budget_hours / ranks / 24
        words = (
            f"plan.budget_hours={self.budget_hours:,.0f} trains {row['budget_tokens']:.4g} tokens in {days:.3g} days"
        )
        if row.get("within_budget") is False:
            words += f"; plan.tokens={self.tokens:.4g} costs {row['gpu_hours'] / self.budget_hours - 1:.1%} more"
        yield f"  {words}"
