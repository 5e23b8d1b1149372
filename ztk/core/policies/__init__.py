"""A user's choices. Every key of the command line is declared here once, as a field of its section (`key`, `config`): type, default, range,
meaning, the runs in which it acts, contradictions, its old name. Next to the sections are the small frozen dataclasses that the engine
takes, with the rules between them. Needs neither torch nor Hydra.
"""
