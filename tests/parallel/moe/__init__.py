"""Tests of mixtures of experts."""
