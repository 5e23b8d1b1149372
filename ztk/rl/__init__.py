"""Alignment: losses and records, and the rollouts they learn from."""
