"""Which steps of a run are profiled."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfilePolicy:
    """Optimizer steps `first` to `last` of a run are profiled, both included, counted from 1.

    Raises:
        ValueError: `first` is below 1 or above `last`.
    """

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.last:
            raise ValueError(
                f"train.profile={self.first}:{self.last}: must be START:STOP, the first and the last step, with 1 <= START <= STOP, as in "
                "train.profile=10:12"
            )

    @staticmethod
    def of(text: str) -> "ProfilePolicy":
        """From "START:STOP". Raises ValueError for any other text."""
        match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text.strip())
        if match is None:
            raise ValueError(
                f"train.profile={text}: must be START:STOP, the first and the last step that are profiled, as in train.profile=10:12"
            )
        return ProfilePolicy(first=int(match[1]), last=int(match[2]))
