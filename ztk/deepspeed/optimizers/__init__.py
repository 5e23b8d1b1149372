"""The optimizer that `initialize` returns, DeepSpeed's own optimizer classes, groups, schedules and loss scales."""
