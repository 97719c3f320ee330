"""What a table of another system's options is made of: one :class:`Option` for each, with what becomes of it here.

``everstep config import`` and docs/migrating.md are both made from these tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

_UNSET: Any = object()


class Untranslatable(Exception):
    """A value of an option that has no counterpart; the text says why, and what to do instead."""


class Given:
    """The options that were given, by the name in the table, and what the others are by default.

    ``records``: number of training records, if it is known; functions that need it raise :class:`Untranslatable` where it is not.
    """

    def __init__(self, values: Mapping[str, Any], table: Mapping[str, Option], records: int | None = None):
        self._values, self._table, self.records = dict(values), table, records

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str) -> Any:
        """What was given, else the default of the table, else None."""
        if name in self._values:
            return self._values[name]
        default = self._table[name].default
        return None if default is _UNSET else default

    def integer(self, name: str) -> int:
        """As :meth:`get`. ``Untranslatable`` if it is no integer."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise Untranslatable(f"{name}={value!r} is no integer")
        return value


Translate = Callable[[Any, Given], Mapping[str, Any]]


@dataclass(frozen=True)
class Option:
    """One option of another system.

    ``kind``: ``mapped``: it becomes ``ours``; ``implied``: there is nothing to set, what it asks for is so in any case;
    ``unsupported``: there is no counterpart. ``how``: how a value is carried over, or the reason. ``to(value, given)``: our keys and
    their values; raises :class:`Untranslatable` for a value without counterpart. ``default``: theirs, which is translated, too, when the
    option is not given and ``fill`` is set: where their default is another than ours.
    """

    name: str
    kind: Literal["mapped", "implied", "unsupported"]
    ours: tuple[str, ...]
    how: str
    to: Translate
    default: Any = _UNSET
    fill: bool = False
    aliases: tuple[str, ...] = ()


def same(name: str, ours: str, how: str = "", *, default: Any = _UNSET, aliases: tuple[str, ...] = ()) -> Option:
    """The same under another name. A ``default`` is filled in: give it only where it is another than ours."""
    return Option(name, "mapped", (ours,), how, lambda value, given: {ours: value}, default, default is not _UNSET, aliases)


def mapped(
    name: str, ours: str | tuple[str, ...], how: str, to: Translate, *, default: Any = _UNSET, fill: bool = True, aliases: tuple[str, ...] = ()
) -> Option:
    """Translated by ``to``. A ``default`` is filled in unless ``fill`` is false (then it serves other options only)."""
    keys = (ours,) if isinstance(ours, str) else ours
    return Option(name, "mapped", keys, how, to, default, fill and default is not _UNSET, aliases)


def implied(name: str, how: str, *, only: tuple[Any, ...] = (), otherwise: str = "", aliases: tuple[str, ...] = ()) -> Option:
    """Nothing to set. With ``only``: for these values; any other is unsupported for the reason ``otherwise``."""

    def to(value: Any, given: Given) -> Mapping[str, Any]:
        if only and value not in only:
            raise Untranslatable(otherwise or how)
        return {}

    return Option(name, "implied", (), how, to, aliases=aliases)


def unsupported(name: str, why: str, *, aliases: tuple[str, ...] = ()) -> Option:
    """No counterpart."""

    def to(value: Any, given: Given) -> Mapping[str, Any]:
        raise Untranslatable(why)

    return Option(name, "unsupported", (), why, to, aliases=aliases)


def table(*options: Option) -> dict[str, Option]:
    """By name. A name twice is our own mistake."""
    found = {option.name: option for option in options}
    assert len(found) == len(options), sorted(option.name for option in options)
    return found
