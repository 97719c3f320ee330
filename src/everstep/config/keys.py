"""The schema seen by dotted key: which keys exist, what type each takes, which one a typo meant."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from everstep.config.schema import Config, Section
from everstep.errors import ConfigError

_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def fields(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """(dotted key, field) of every field that holds a value; entries of ``faults`` are not descended into."""
    for name, info in section.model_fields.items():
        key = f"{prefix}{name}"
        if section_of(info.annotation):
            yield from fields(section_of(info.annotation), key + ".")  # type: ignore[arg-type]
        else:
            yield key, info


def sections(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    """(dotted key, class) of every section."""
    for name, info in section.model_fields.items():
        inner = section_of(info.annotation)
        if inner:
            yield f"{prefix}{name}", inner
            yield from sections(inner, f"{prefix}{name}.")


def field_type(key: str) -> Any:
    """Annotation of the value at a dotted ``key``, free mappings and list entries included. ``KeyError``."""
    current: Any = Config
    for part in key.split("."):
        if isinstance(current, type) and issubclass(current, Section):
            current = current.model_fields[part].annotation
        elif get_origin(current) is dict:
            current = get_args(current)[1]
        elif get_origin(current) is list and part.isdigit():
            current = get_args(current)[0]
        elif current is not Any:
            raise KeyError(key)
    return current


def nearest(key: str) -> list[str]:
    """Valid keys that ``key`` may have meant, best first."""
    parent, _, last = key.rpartition(".")
    entry = _entry(parent)
    if entry:  # a slip inside an entry of a list
        return [f"{parent}.{name}" for name in difflib.get_close_matches(last, entry.model_fields, 2)]
    known = [name for name, _ in fields()] + [name for name, _ in sections()]
    inside = dict(sections()).get(parent)
    if inside:  # a slip in the last part inside the right section is likelier than the same name elsewhere
        close = difflib.get_close_matches(last, inside.model_fields, 2, cutoff=0.5)
        if close:
            return [f"{parent}.{name}" for name in close[:1]]
    same_name = [name for name in known if name.rpartition(".")[2] == last]
    if same_name:
        if not parent:
            return same_name
        return sorted(same_name, key=lambda name: -_likeness(key, name))
    by_key = difflib.get_close_matches(key, known, 3, cutoff=0.75)
    lasts: dict[str, list[str]] = {}
    for name in known:
        lasts.setdefault(name.rpartition(".")[2], []).append(name)
    close = difflib.get_close_matches(last, lasts, 2, cutoff=0.75)
    by_last = [name for match in close for name in lasts[match]]
    return sorted(dict.fromkeys(by_key + by_last), key=lambda name: -_likeness(key, name))[:3]


def _entry(key: str) -> type[Section] | None:
    """The section of a list entry such as ``faults.0``."""
    try:
        return section_of(field_type(key)) if key.rpartition(".")[2].isdigit() else None
    except KeyError:
        return None


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def require_known(key: str, where: str) -> None:
    """``ConfigError`` if the schema has no ``key``; ``where`` is its origin."""
    try:
        field_type(key)
    except KeyError:
        raise unknown(key, where) from None


def unknown(key: str, where: str) -> ConfigError:
    """The error for a ``key`` that the schema does not have."""
    near = nearest(key)
    if near:
        hint = f"did you mean {' or '.join(near[:2])}?"
    else:
        parent = key.rpartition(".")[0]
        inside = dict(sections()).get(parent) or _entry(parent)
        names = ", ".join((inside or Config).model_fields)
        hint = f"{parent if inside else 'the top level'} has {names}"
    return ConfigError(f"unknown key {key} ({where}); {hint}")


def section_of(annotation: Any) -> type[Section] | None:
    """The section class, if the field is a section."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def options(annotation: Any) -> tuple[Any, ...]:
    """The members of a union; a plain type alone. A validated kind of text is text."""
    members = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    return tuple(get_args(member)[0] if get_origin(member) is Annotated else member for member in members)


def takes_text(annotation: Any) -> bool:
    """Whether text is a valid value."""
    return str in options(annotation)


def expected(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type in words, with its bounds: ``an integer >= 1``, ``one of none, full``, ``text or null``."""
    bounds = []
    for item in metadata:
        for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
            if getattr(item, name, None) is not None:
                bounds.append(f"{sign} {getattr(item, name)}")
    words = []
    for option in options(annotation):
        if get_origin(option) is Literal:
            words.append("one of " + ", ".join(str(value) for value in get_args(option)))
        elif get_origin(option) is dict:
            words.append("a mapping" if get_args(option)[1] is Any else "a mapping of names to text")
        elif get_origin(option) is list:
            inner = section_of(get_args(option)[0])
            words.append(f"a list of {{{', '.join(inner.model_fields)}}}" if inner else "a list")
        elif section_of(option):
            words.append(f"a section with the keys {', '.join(option.model_fields)}")
        else:
            limits = " " + " and ".join(bounds) if bounds and option in (int, float) else ""
            words.append(_WORDS.get(option, "any value") + limits)
    return " or ".join(words)
