"""YAML for people: nested from dotted keys, each value with a comment that says where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from everstep.config.keys import fields


def nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """``{"a.b": 1}`` as ``{"a": {"b": 1}}``, in the order of the schema."""
    order = {key: index for index, (key, _) in enumerate(fields())}
    tree: dict[str, Any] = {}
    for key in sorted(keys, key=lambda key: order.get(key, len(order))):
        *path, name = key.split(".")
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[name] = keys[key]
    return tree


def commented(keys: Mapping[str, tuple[Any, str]]) -> str:
    """A YAML document of ``{dotted key: (value, comment)}``; top-level keys first, then one block for each section."""
    tree = nested({key: value for key, (value, _) in keys.items()})
    lines: list[str] = []
    for name in sorted(tree, key=lambda name: name not in keys):
        if name not in keys:
            lines.append("")
        lines += _lines(tree[name], name, name, 0, keys)
    return "\n".join(lines)


def comment(text: str) -> str:
    """``text`` as it can stand behind a ``#``: in one line, of printable characters."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _lines(value: Any, name: str, key: str, depth: int, keys: Mapping[str, tuple[Any, str]]) -> list[str]:
    if key not in keys:
        inner = [line for child, below in value.items() for line in _lines(below, child, f"{key}.{child}", depth + 1, keys)]
        return [f"{'  ' * depth}{name}:", *inner]
    text = f"{'  ' * depth}{name}: {_scalar(value)}"
    return [f"{text:<48}  # {comment(keys[key][1])}"]


def _scalar(value: Any) -> str:
    if isinstance(value, float):
        return repr(value) if "." in repr(value) or "e" not in repr(value) else repr(value).replace("e", ".0e")  # YAML 1.1 wants the point
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()
