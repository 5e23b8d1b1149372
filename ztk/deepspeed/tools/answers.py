"""One-line getter methods, for DeepSpeed's classes with methods in place of attributes."""

from operator import attrgetter
from typing import Any


def method(path: str, doc: str) -> Any:
    """Returns a method that returns the value at a dotted path of its object."""
    read = attrgetter(path)

    def get(self: Any) -> Any:
        return read(self)

    get.__doc__ = doc
    return get


def always(value: object, doc: str) -> Any:
    """Returns a method that always returns the same value."""

    def get(self: Any) -> Any:
        return value

    get.__doc__ = doc
    return get
