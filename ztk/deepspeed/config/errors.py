"""The one error of a configuration."""


class DeepSpeedConfigError(ValueError):
    """Everything that is wrong with a configuration, one line each in `faults`."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        head = "the DeepSpeed configuration is refused:\n  " if len(faults) > 1 else ""
        super().__init__(head + "\n  ".join(faults))

    def __reduce__(self) -> tuple:
        return DeepSpeedConfigError, (self.faults,)
