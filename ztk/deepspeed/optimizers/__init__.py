"""The optimizer that `initialize` returns, DeepSpeed's own optimizer classes, parameter groups, schedules and loss scales."""
