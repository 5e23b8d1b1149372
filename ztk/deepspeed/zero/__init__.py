"""Functions of `deepspeed.zero` and `deepspeed.utils` for sharded parameters. `names/table.py` lists the modules of its names."""

from ztk.deepspeed.names.tree import lookup, names_of

__all__ = names_of("deepspeed.zero")


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    return lookup(name, "deepspeed.zero")
