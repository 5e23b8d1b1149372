"""Foundations: the options a user chooses, processes and collectives, launching, precision."""
