"""zero_optimization.leaf_module: which modules stage 3 gathers as one."""

from dataclasses import dataclass
from typing import Any

from ztk.deepspeed.config.keys import Findings, read_section, takes

USUAL_CLASSES = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LeafModules:
    """Classes by their names or full names, modules by their names or the ends of their names. wanted: what the configuration named."""

    classes: tuple[str, ...] = USUAL_CLASSES
    names: tuple[str, ...] = ()
    name_suffixes: tuple[str, ...] = ()
    wanted: frozenset[str] = frozenset()


def _words(value: object) -> tuple[str, ...]:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) for word in words):
        raise ValueError('must be a list of names, such as ["MixtralSparseMoeBlock"]')
    return tuple(dict.fromkeys(words))


KEYS = {"classes": takes(_words), "names": takes(_words), "name_suffixes": takes(_words)}


def read_leaf_modules(given: object, *, findings: Findings) -> LeafModules:
    """The section, or DeepSpeed's usual classes if there is none."""
    if given is None:
        return LeafModules()
    values: dict[str, Any] = read_section(given, path="zero_optimization.leaf_module.", keys=KEYS, findings=findings)
    return LeafModules(**values, wanted=frozenset(word for words in values.values() for word in words))
