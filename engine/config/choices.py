"""Keys whose values are the names in a table of a package above the config, such as planners.

Tables are looked up by their paths, and only when a value is checked or a trait is needed: nothing else is taken from
above.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import PydanticKnownError, core_schema

from engine.tables import imported


@dataclass(frozen=True)
class Choice:
    """Marks a text that is a name in the table at `path`, or one of `others`: `Annotated[str, Choice("a.b:TABLE")]`."""

    path: str
    others: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The allowed values, in the order of the table."""
        table: Mapping[str, object] = imported(self.path)
        return [*table, *self.others]

    def checked(self, value: object) -> str:
        """Return a value that is allowed; otherwise raise the error that pydantic raises for a Literal."""
        names = self.names
        if isinstance(value, str) and value in names:
            return value
        *most, last = map(repr, names)
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(most)} or {last}" if most else last})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.checked)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"type": "string", "enum": self.names}


def values_of(field: FieldInfo | None) -> list[Any]:
    """Return the values that a field lists, also as one of several types or as items of a list."""
    kinds, marks, found = [field.annotation] if field else [], [*field.metadata] if field else [], list[Any]()
    for kind in kinds:
        marks += getattr(kind, "__metadata__", ())
        if get_origin(kind) is Literal:
            found += get_args(kind)
        elif get_origin(kind) is not dict:
            kinds += get_args(kind)
    return found + [name for one in marks if isinstance(one, Choice) for name in one.names]
