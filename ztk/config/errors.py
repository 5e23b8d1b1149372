"""The error for invalid configurations."""


class ConfigError(ValueError):
    """The configuration is invalid. The message lists all faults."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = tuple(faults)
        title = "the configuration is refused:" if len(faults) > 1 else "the configuration is refused: "
        super().__init__(title + ("\n  - " + "\n  - ".join(faults) if len(faults) > 1 else faults[0]))

    def __reduce__(self) -> tuple:
        return (ConfigError, (list(self.faults),))
