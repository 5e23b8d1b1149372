"""Alignment: losses and records (`align`), and samples drawn from the model that trains (`rollout`)."""
