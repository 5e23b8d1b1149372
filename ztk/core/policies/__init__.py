"""What a user chooses. Every key of the command line is declared here once, as a field of its section (`key`, `config`): type, default, range,
meaning, the runs in which it acts, what it contradicts, its old name. Next to the sections are the small frozen dataclasses that the engine
takes, with the rules between them. Needs neither torch nor Hydra.
"""
