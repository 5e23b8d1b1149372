"""Compiles kernels ahead of time and holds the compiled code to budgets."""
