"""Alignment: losses and records (`align`), and samples from the model in training (`rollout`)."""
