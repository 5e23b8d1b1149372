"""Configuration keys and policies. Every key of the command line is declared once (`key`): type, default, range, meaning, the runs in which
it acts, contradictions. A policy, a frozen dataclass that the engine takes, declares its keys, and its section on the command
line is derived from it (`section`). `config` joins the sections. Imports neither torch nor Hydra.
"""
