"""The keys `general.*` of a GGUF file that describe a model: author, license, base model and so on.

A folder that was unpacked from a GGUF file keeps its keys in `gguf_general.json`. In other folders they are made from the header of the
model card, README.md.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_FILE = "gguf_general.json"
_PREFIX = "general."
_NAME = "general.name"
# Keys of the file itself, which the writer sets.
_OWN = {_PREFIX + key for key in ("architecture", "alignment", "file_type", "quantization_version", "type")}
_MOST_BYTES = 1 << 20  # of a model card
_TEXTS = ("author", "version", "organization", "description", "url", "repo_url", "doi", "license")
_LISTS = {"language": "languages", "tags": "tags"}
_OTHERS = {"base_model": "base_model", "datasets": "dataset"}  # lists of names or addresses of models and datasets

Value = tuple[list[str], Any]  # names of GGUF types, outer first; a string, a number, a bool or a list of them


def write_general(fields: Mapping[str, Any], *, folder: Path) -> None:
    """Writes the keys of a file into `folder`. fields: fields of a GGUFReader."""
    found = {
        name: ([kind.name for kind in field.types], field.contents())
        for name, field in fields.items()
        if name.startswith(_PREFIX) and name not in _OWN
    }
    (folder / _FILE).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def read_general(folder: Path, *, name: str, library: Any) -> dict[str, Value]:
    """Returns the keys of the model in `folder`. name: for `general.name` if the folder has none.

    Raises ValueError for keys that cannot be written.
    """
    path = folder / _FILE
    found = {_NAME: _text(name)} | (
        _checked(path, library=library) if path.is_file() else _of_card(folder, library=library)
    )
    return {key: value for key, value in found.items() if value[1] != []}


def add_general(writer: Any, found: Mapping[str, Value], *, library: Any) -> None:
    """Adds the keys to a GGUFWriter."""
    for key, (kinds, value) in found.items():
        outer, *inner = (library.GGUFValueType[kind] for kind in kinds)
        writer.add_key_value(key, value, outer, *inner[-1:])


def _text(value: str) -> Value:
    return ["STRING"], value


def _texts(values: list[str]) -> Value:
    return ["ARRAY", "STRING"], values


def _checked(path: Path, *, library: Any) -> dict[str, Value]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        for key, (kinds, value) in found.items():
            if not key.startswith(_PREFIX) or key in _OWN:
                raise KeyError(key)
            outer, *inner = (library.GGUFValueType[kind] for kind in kinds)
            if isinstance(value, list) != bool(inner) or (outer is library.GGUFValueType.ARRAY) != bool(inner):
                raise TypeError(f"{key} is no {outer.name}")
            for one in value if inner else [value]:
                _check_value(one, kind=(inner or [outer])[-1], library=library)
    except Exception as error:  # noqa: BLE001 - a damaged file gives errors of many kinds
        raise ValueError(
            f"{path}: does not hold keys of a GGUF file ({type(error).__name__}: {error}); remove it, or unpack the GGUF file again"
        ) from None
    return {key: (kinds, value) for key, (kinds, value) in found.items()}


def _check_value(value: Any, *, kind: Any, library: Any) -> None:
    """Raises an error for a value that the format cannot hold."""
    if (kind is library.GGUFValueType.STRING) != isinstance(value, str):
        raise TypeError(f"{value!r} is no {kind.name}")
    library.GGUFWriter(None, "none", dry_run=True)._pack_val(value, kind, add_vtype=False)


def _of_card(folder: Path, *, library: Any) -> dict[str, Value]:
    path = folder / "README.md"
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"longer than {_MOST_BYTES} bytes")
        header = path.read_text(encoding="utf-8").split("\n---", 1)[0]
        if "<<" in header:
            raise ValueError("merges mappings by <<")  # nested ones grow exponentially
        card = library.Metadata.load_model_card(folder)
    except Exception as error:  # noqa: BLE001 - a card is text by anybody, and YAML's reader raises errors of many kinds
        logger.warning("%s: its header is not read (%s)", path, str(error).partition("\n")[0])
        return {}
    found = {}
    for key in _TEXTS:
        if isinstance(value := card.get(key), str | int | float) and not isinstance(value, bool):
            found[_PREFIX + key] = _text(str(value))
    for key, place in (("license_name", "license.name"), ("license_link", "license.link"), ("model_name", "name")):
        if isinstance(value := card.get(key), str):
            found[_PREFIX + place] = _text(value)
    for key, place in _LISTS.items():
        found[_PREFIX + place] = _texts(_strings(card.get(key)))
    for key, place in _OTHERS.items():
        if others := _strings(card.get(key)):
            found |= _described(others, place=_PREFIX + place)
    return found


def _strings(value: Any) -> list[str]:
    listed = value if isinstance(value, list) else [value]
    return [one for one in listed if isinstance(one, str)]


def _described(others: list[str], *, place: str) -> dict[str, Value]:
    """Describes base models or datasets, such as "owner/name", which are repositories on the Hugging Face hub."""
    found: dict[str, Value] = {f"{place}.count": (["UINT32"], len(others))}
    for index, other in enumerate(others):
        owner, _, name = other.rpartition("/")
        found[f"{place}.{index}.name"] = _text(name)
        if owner and "/" not in owner:
            found[f"{place}.{index}.organization"] = _text(owner)
            found[f"{place}.{index}.repo_url"] = _text(f"https://huggingface.co/{other}")
    return found
