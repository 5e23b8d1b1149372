"""Measurements and output during training: times, memory, FLOPs, monitors.

The engine calls `watcher` around forward, backward and step; each other module is one instrument.
"""
