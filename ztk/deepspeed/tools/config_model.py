"""`deepspeed.runtime.config_utils.DeepSpeedConfigModel`: the pydantic base class for configurations of other projects.

ztk's own configuration does not use it. Importing this module needs pydantic.
"""

import functools
import importlib
from typing import Any

from ztk.deepspeed.tools.log import logger

pydantic: Any = importlib.import_module("pydantic")


class DeepSpeedConfigModel(pydantic.BaseModel):
    """Raises pydantic.ValidationError for unknown keys and values of a wrong type. A value "auto" counts as not given, unless `strict`.

    A field `Field(default, json_schema_extra={"deprecated": True, "new_param": "other.name", "deprecated_msg": "..."})` warns when it is
    given, and passes its value (through `new_param_fn`) to the new field, unless `set_new_param` is False.
    """

    model_config = pydantic.ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        if not strict:
            data = {key: value for key, value in data.items() if value != "auto" or key == "replace_method"}
        super().__init__(**data)
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("deprecated") and name in self.model_fields_set:
                self._hand_on(name, extra=extra)

    def _hand_on(self, name: str, *, extra: dict) -> None:
        """Passes the value of a deprecated field to its replacement. Raises ValueError if that is given too."""
        new = extra.get("new_param", "")
        words = [f"{name} is deprecated", f"use {new}" if new else "", extra.get("deprecated_msg", "")]
        logger.warning("config: %s", "; ".join(filter(None, words)))
        if not new or not extra.get("set_new_param", True):
            return
        *path, last = new.split(".")
        owner = functools.reduce(getattr, path, self)
        if last in owner.model_fields_set:
            raise ValueError(f"{name}: is the old form of {new}, which is given too; keep {new}")
        value = getattr(self, name)
        setattr(owner, last, extra.get("new_param_fn", lambda value: value)(value))
