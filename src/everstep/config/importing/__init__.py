"""From another system's configuration to ours: ``everstep config import``, and the tables of docs/migrating.md.

Every option that was given ends in one of four places, and is told: translated, needing nothing, without counterpart (with the
reason), or not known to the table. Nothing is dropped silently, and nothing of what is read is run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from everstep.config.explain import show
from everstep.config.importing import ray_example, siirl, torchtitan, twinkle
from everstep.config.importing.option import Given, Option, Untranslatable
from everstep.config.importing.reading import read
from everstep.config.load import from_tree
from everstep.config.writing import comment, commented, nested
from everstep.errors import BadInput, ConfigError

SYSTEMS: dict[str, ModuleType] = {"siirl": siirl, "torchtitan": torchtitan, "ray-example": ray_example, "twinkle": twinkle}
_REQUIRED = {
    "recipe": "sft, grpo, ppo or dpo",
    "model.path": "a directory with config.json, hf:ORG/NAME, or package:NAME",
    "data.source": "a .parquet or .jsonl file, reasoning_gym:TASK, or module:function",
}


@dataclass
class Translation:
    """What became of it. ``keys``: ours, with value and what it comes from; ``mapped``: their options, and the keys that they set. The
    others: their option, and a sentence."""

    system: ModuleType
    keys: dict[str, tuple[Any, str]] = field(default_factory=dict)
    mapped: dict[str, tuple[str, ...]] = field(default_factory=dict)
    implied: dict[str, str] = field(default_factory=dict)
    unsupported: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> dict[str, str]:
        """Keys without a default that have no value yet, and what they take."""
        return {key: takes for key, takes in _REQUIRED.items() if key not in self.keys}


def translate(name: str, arguments: Sequence[str], records: int | None = None, environ: Mapping[str, str] = os.environ) -> Translation:
    """``arguments`` (perhaps a file, then overrides) of the system ``name``. ``BadInput`` if that cannot be read.

    ``records``: number of training records, for systems that count passes over the data; else the file is counted, if it is there.
    """
    if name not in SYSTEMS:
        raise BadInput(f"--from {name}: known are {', '.join(SYSTEMS)}")
    system = SYSTEMS[name]
    found = read(system, arguments, environ)
    options: dict[str, Option] = system.OPTIONS
    canonical = {alias: option.name for option in options.values() for alias in (option.name, *option.aliases)}
    result = Translation(system)
    values: dict[str, Any] = {}
    for given_name, value in found.values.items():
        if given_name in canonical:
            values[canonical[given_name]] = value
        else:
            result.unknown[given_name] = f"={_show(value)}: no option that is known"
    result.unknown |= {given_name: reason for given_name, reason in found.unknown.items() if given_name not in canonical}
    unclear = {canonical[n]: reason for n, reason in found.unknown.items() if n in canonical}
    given = Given(values, options, records if records is not None else _count(values))
    for option in options.values():
        if option.name in unclear:
            result.unsupported[option.name] = f" is not known: {unclear[option.name]}; give it as {option.name}=VALUE"
        elif option.name in values:
            _one(option, values[option.name], given, result)
        elif option.fill:
            _one(option, option.default, given, result, by_default=True)
    _finish(result, given)
    _validate(result)
    return result


def _one(option: Option, value: Any, given: Given, result: Translation, by_default: bool = False) -> None:
    told = f"={_show(value)}"
    try:
        made = option.to(value, given)
    except Untranslatable as why:
        if not by_default or option.name in ("trainer.total_epochs",):
            result.unsupported[option.name] = f"{told}: {why}"
        return
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
        raise BadInput(f"{option.name}{told} is no value that {result.system.TITLE} would take ({type(error).__name__})") from error
    if option.kind == "implied" or not made:
        if not by_default:
            result.implied[option.name] = f"{told}: {option.how or 'as it is'}"
        return
    if not by_default:
        result.mapped[option.name] = tuple(made)
    for key, our_value in made.items():
        before = result.keys.get(key)
        if before is not None and before[0] != our_value and not by_default:
            del result.mapped[option.name]
            result.unsupported[option.name] = f"{told}: {key} is {_show(before[0])} by {before[1]}"
            return
        if before is None:
            result.keys[key] = (our_value, f"{option.name}{told}" + (" (default there)" if by_default else ""))


def _finish(result: Translation, given: Given) -> None:
    plain = {key: value for key, (value, _) in result.keys.items()}
    result.system.finish(plain, given)
    for key, value in plain.items():
        if key not in result.keys or result.keys[key][0] != value:
            result.keys[key] = (value, result.system.TITLE)


def _validate(result: Translation) -> None:
    """Every value must be one that our schema takes; a value that is not is a fault of what was read. ``ConfigError``."""
    tree = nested({key: value for key, (value, _) in result.keys.items()})
    for key in result.missing:
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = "sft" if key == "recipe" else "x"
    try:
        from_tree(tree)
    except ConfigError as error:
        key = str(error).split(" ", 1)[0].rstrip(":")
        source = result.keys.get(key, (None, ""))[1]
        raise ConfigError(f"{error}" + (f" (from {source})" if source else "")) from error


def _count(values: Mapping[str, Any]) -> int | None:
    """Records of the training file, if it is a parquet file on this machine."""
    files = values.get("data.train_files")
    path = Path(str(files[0] if isinstance(files, list) and files else files)).expanduser()
    if not files or path.suffix != ".parquet" or not path.is_file():
        return None
    import pyarrow.parquet

    try:
        return int(pyarrow.parquet.read_metadata(path).num_rows)
    except (OSError, ValueError):
        return None


def _show(value: Any) -> str:
    return show(list(value) if isinstance(value, tuple) else value)


def as_yaml(result: Translation, what: str) -> str:
    """A configuration file: our keys, each with what it comes from; above them what has no counterpart, below what needs none."""
    def lines(items: Mapping[str, str]) -> list[str]:
        return [comment(f"#   {name}{reason}") for name, reason in items.items()]

    head = [comment(f"# Translated from {result.system.TITLE}: everstep config import {what}")]
    for title, items in (
        ("Without counterpart here:", result.unsupported),
        ("Not known, and left out:", result.unknown),
        ("To be given, before anything can be planned:", {key: f": {takes}" for key, takes in result.missing.items()}),
    ):
        head += ["#", f"# {title}", *lines(items)] if items else []
    tail = ["", "# Nothing to set for:", *lines(result.implied)] if result.implied else []
    return "\n".join([*head, commented(result.keys), *tail]) + "\n"
