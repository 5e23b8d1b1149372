"""Configuration keys and policies. Every key of the command line is declared once, as a field of its section (`key`, `config`): type,
default, range, meaning, the runs in which it acts, contradictions, its old name. The frozen dataclasses that the engine takes are next to
the sections, with the rules between them. Imports neither torch nor Hydra.
"""
