"""What a user chooses: small frozen dataclasses, their ranges and the rules between them. Needs neither torch nor Hydra.

The packages that follow a policy offer it under their own name (`ztk.zero.ZeroPolicy`). `ztk.config` takes its ranges and messages from
here, so every rule is written once.
"""
