"""The line and the text of each key in a YAML text, for messages and for `bytescale config show --origin`."""

from __future__ import annotations

from collections.abc import Iterator

import yaml


def yaml_lines(text: str) -> dict[str, int]:
    """Return the line, from 1, of each dotted key and of each item of a list: {"run": 3, "run.steps": 4, ...}.

    The text is valid YAML. Raises yaml.YAMLError if it is not.
    """
    return {key: line for key, line, _ in _nodes(text)}


def yaml_texts(text: str) -> dict[str, str]:
    """Return the text of each value that is no section or list: {"run.steps": "1e3", ...}. Raises as `yaml_lines`."""
    return {key: node.value for key, _, node in _nodes(text) if isinstance(node, yaml.ScalarNode)}


def _nodes(text: str) -> Iterator[tuple[str, int, yaml.Node]]:
    """Yield each dotted key, and each number of an item of a list, with its line and the node of its value."""

    def walk(node: yaml.Node | None, prefix: str, above: tuple[yaml.Node, ...]) -> Iterator[tuple[str, int, yaml.Node]]:
        if node in above:  # an alias of a node that contains it
            return
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                yield f"{prefix}{key.value}", key.start_mark.line + 1, value
                yield from walk(value, f"{prefix}{key.value}.", (*above, node))
        elif isinstance(node, yaml.SequenceNode):
            for number, item in enumerate(node.value):
                yield f"{prefix}{number}", item.start_mark.line + 1, item

    return walk(yaml.compose(text, Loader=yaml.SafeLoader), "", ())
