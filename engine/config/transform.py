"""The steps of a `transform`: each names a transform, with its options. The table of transforms has their types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ValidationError

from engine.tables import imported

TRANSFORMS = "engine.data.transforms.transforms:TRANSFORMS"


def _checked(step: object) -> dict[str, dict[str, int | str]]:
    """Return a step with the values of its options. Raises ValueError with a sentence about the first mistake."""
    table = imported(TRANSFORMS)
    if not isinstance(step, Mapping) or len(step) != 1:
        raise ValueError(f"has a step that is not one name with its options: {step}")
    ((name, given),) = step.items()
    if name not in table:
        raise ValueError(f"has an unknown transform: {name}; there are {', '.join(table)}")
    options: type[BaseModel] = table[name].options
    if not isinstance(given, Mapping):
        raise ValueError(f"has {name} without its options: {', '.join(options.model_fields)}")
    try:
        found = options.model_validate(given, strict=True)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        key = ".".join([name, *map(str, detail["loc"])])
        if detail["type"] == "extra_forbidden":
            raise ValueError(f"{key}: unknown option; {name} has {', '.join(options.model_fields)}") from None
        message = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        raise ValueError(f"{key}: {'is not set' if detail['type'] == 'missing' else message}") from None
    return {name: found.model_dump(mode="json", exclude_none=True)}


Step = Annotated[dict[str, dict[str, int | str]], BeforeValidator(_checked)]
