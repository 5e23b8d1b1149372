"""Kernels compiled ahead of time, and budgets of what the compiler makes of them."""
