"""What is measured, printed and written while a script trains: times, memory, FLOPs, monitors.

`watcher` is what the engine calls around forward, backward and step; the others are one instrument each.
"""
