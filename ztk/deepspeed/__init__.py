"""The compatibility layer for scripts written for DeepSpeed: `import ztk.deepspeed as deepspeed`.

    engine, optimizer, _, _ = deepspeed.initialize(model=model, config="ds_config.json")
    for x, y in batches:
        loss = criterion(engine(x), y)
        engine.backward(loss)
        engine.step()

`python -m ztk.deepspeed script.py` and `ztk.deepspeed.install()` make it importable as `deepspeed`. Names are imported on first use;
`ztk/deepspeed/names/table.py` lists them with their modules. docs/deepspeed.md describes which features are supported.
"""

from ztk.deepspeed.names.tree import lookup as _lookup
from ztk.deepspeed.names.tree import names_of as _names_of

__all__ = _names_of("deepspeed")


def __getattr__(name: str) -> object:
    if name.startswith("__") and not name.startswith(("__version", "__git")):
        raise AttributeError(name)
    value = _lookup(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
