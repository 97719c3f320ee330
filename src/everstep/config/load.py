"""From a YAML file and command-line overrides to a :class:`Config`, and back to ``resolved.yaml``.

A value's origin is kept beside it: default, file and line, or command line. Every mistake a file can hold
(unknown key, wrong type, missing value, broken YAML) becomes one :class:`ConfigError` of one sentence that
names the full key and where it was given.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from everstep.config.keys import expected, field_type, options, require_known, section_of, takes_text, unknown
from everstep.config.schema import Config, Section
from everstep.errors import ConfigError, first_line

# What omegaconf raises for a value it cannot parse or a place it cannot reach.
_CANNOT_SET = (OmegaConfBaseException, yaml.YAMLError, ValueError, IndexError, TypeError, AttributeError)

COMMAND_LINE = "command line"
DEFAULT = "default"


@dataclass(frozen=True)
class Origins:
    """Where values came from: each dotted key that was given (not defaulted), and ``FILE:LINE`` or ``command line``."""

    path: Path | None
    given: dict[str, str] = field(default_factory=dict)

    def of(self, key: str) -> str:
        """The origin of ``key``; of a section or mapping: of what was given last inside it."""
        if key in self.given:
            return self.given[key]
        inside = [origin for given, origin in self.given.items() if given.startswith(key + ".")]
        # Of a mapping or list that was given whole; a section that was given leaves its other keys to their defaults.
        above = [
            origin
            for given, origin in self.given.items()
            if key.startswith(given + ".") and not section_of(field_type(given))
        ]
        return (inside or above or [DEFAULT])[-1]


@dataclass(frozen=True)
class Loaded:
    """A configuration, with where it came from."""

    config: Config
    overrides: tuple[str, ...]
    origins: Origins

    @property
    def path(self) -> Path | None:
        return self.origins.path


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in ``path``, ``overrides`` applied (see :func:`parse_overrides`). ``ConfigError``."""
    return load(path, overrides).config


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> Loaded:
    """Like :func:`load_config`, with the origin of every value. ``path=None``: overrides alone."""
    origins = Origins(Path(path) if path is not None else None)
    given = origins.given
    tree = OmegaConf.create({})
    if origins.path is not None:
        text = _read(origins.path)
        tree = _parse(text, origins.path)
        given.update({key: f"{path}:{line}" for key, line in _lines(text)})
    for key, raw in parse_overrides(overrides):
        require_known(key, COMMAND_LINE)
        try:
            value = _value(key, raw)
            OmegaConf.update(tree, key, value, merge=False, force_add=True)
        except _CANNOT_SET as e:
            raise ConfigError(f"{key}={raw} ({COMMAND_LINE}) cannot be set: {first_line(e)}") from e
        for old in [k for k in given if k == key or k.startswith(key + ".")]:
            del given[old]
        given.update(dict.fromkeys(_leaves(key, value), COMMAND_LINE))
    try:
        raw_tree = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as e:
        where = f"{e.full_key}: " if getattr(e, "full_key", None) else ""
        raise ConfigError(f"{where}{first_line(e)} (in {path or COMMAND_LINE})") from e
    assert isinstance(raw_tree, dict)
    return Loaded(_validate(_walk(Config, raw_tree, "", origins), origins), tuple(overrides), origins)


def from_tree(tree: Mapping[str, Any]) -> Config:
    """A configuration from a nested mapping, as Python callers have it; the same errors as from a file."""
    origins = Origins(None)
    return _validate(_walk(Config, dict(tree), "", origins), origins)


def dump(config: Config) -> str:
    """YAML that :func:`load_config` turns into an equal configuration: every value, defaults included."""
    return OmegaConf.to_yaml(OmegaConf.create(_escape(config.model_dump())))


def save(config: Config, path: str | Path) -> Path:
    """Write ``resolved.yaml``. The folder is made if needed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("# Every value of this run, defaults included.\n" + dump(config))
    return path


#: What may differ between the controller that started a run and one that takes over: it changes nothing of what is trained.
_FREE = ("resume", "faults", "telemetry.", "recovery.controller_restarts")


def differing(config: Config, saved: str | Path) -> list[str]:
    """Keys in which ``config`` is another than the one that :func:`save` wrote, those left out that do not matter for a takeover."""
    mine, theirs = _flat(config.model_dump()), _flat(load_config(saved).model_dump())
    return [key for key in sorted(mine | theirs) if mine.get(key) != theirs.get(key) and not key.startswith(_FREE)]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _escape(value: Any) -> Any:
    # `${` is an interpolation in YAML that we read; a literal one must survive the round trip.
    if isinstance(value, str):
        return value.replace("${", "\\${")
    if isinstance(value, dict):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    return value


# ---------------------------------------- the command line


def parse_overrides(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """[(key, raw value)] of ``a.b=c``, ``--a.b=c`` and ``--a.b c``, in order; else ``ConfigError``."""
    result: list[tuple[str, str]] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        key, equals, raw = argument.removeprefix("--").partition("=")
        if not equals and argument.startswith("--") and rest:
            raw, equals = rest.pop(0), "="
        if not key or not equals:
            hint = f"--{key} VALUE" if argument.startswith("--") else "KEY=VALUE"
            raise ConfigError(f"{argument!r} on the command line sets nothing; overrides are written {hint}")
        result.append((key.strip(), raw))
    return result


def _value(key: str, raw: str) -> Any:
    """``raw`` read as YAML, except where the field is text: there ``007`` and ``1e3`` stay what was typed."""
    parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={raw}"]))["value"]  # type: ignore[call-overload, index]
    annotation = field_type(key)
    if takes_text(annotation) and isinstance(parsed, bool | int | float):
        return raw.strip()
    if annotation is str and not raw:
        return ""
    return parsed


# ---------------------------------------- files


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as e:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], 1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"there is no configuration file {path}{hint}") from e
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"the configuration file {path} cannot be read: {first_line(e)}") from e


def _parse(text: str, path: Path) -> Any:
    try:
        tree = OmegaConf.create(text)
    except yaml.MarkedYAMLError as e:
        line = f":{e.problem_mark.line + 1}" if e.problem_mark else ""
        raise ConfigError(f"{path}{line} is not valid YAML: {e.problem or first_line(e)}") from e
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as e:
        raise ConfigError(f"{path} is not a valid configuration: {first_line(e)}") from e
    if not OmegaConf.is_dict(tree):
        raise ConfigError(f"{path} holds a list; a configuration is a mapping of keys to values")
    return tree


def _lines(text: str) -> Iterator[tuple[str, int]]:
    """(dotted key, line) of every value in ``text`` that is no mapping, and of list entries."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    stack: list[tuple[str, Any, int]] = [("", root, 1)] if root is not None else []
    while stack:
        key, node, line = stack.pop(0)
        if isinstance(node, yaml.MappingNode) and (node.value or not key):
            # A merged anchor (`<<: *base`) has its keys' own lines.
            for name, value in node.value:
                inner = key if name.value == "<<" else f"{key}.{name.value}".lstrip(".")
                stack.append((inner, value, name.start_mark.line + 1))
            continue
        yield key, line
        if isinstance(node, yaml.SequenceNode):
            stack += [(f"{key}.{i}", item, item.start_mark.line + 1) for i, item in enumerate(node.value)]


def _leaves(key: str, value: Any) -> list[str]:
    """``key``, or, where a section was given as a mapping, the keys in it."""
    if isinstance(value, dict) and value:
        return [leaf for name, inner in value.items() for leaf in _leaves(f"{key}.{name}", inner)]
    return [key]


# ---------------------------------------- validation


def _walk(section: type[Section], tree: dict[Any, Any], prefix: str, origins: Origins) -> dict[str, Any]:
    """``tree``, unknown keys refused, text fields made text, empty sections left to their defaults."""
    clean: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        info = section.model_fields.get(str(name))
        if info is None:
            raise unknown(key, origins.of(key) if origins.of(key) != DEFAULT else "configuration")
        inner = section_of(info.annotation)
        if inner and value is None:
            continue  # `layout:` with nothing under it
        if inner and not isinstance(value, dict):
            raise _wrong(key, value, info, origins)
        if inner:
            clean[name] = _walk(inner, value, key + ".", origins)
        elif get_origin(info.annotation) is list and isinstance(value, list):
            element = section_of(get_args(info.annotation)[0])
            clean[name] = [
                _walk(element, item, f"{key}.{i}.", origins) if element and isinstance(item, dict) else item
                for i, item in enumerate(value)
            ]
        elif info.annotation == dict[str, str] and isinstance(value, dict):
            clean[name] = {k: _as_text(v) for k, v in value.items()}
        else:
            clean[name] = _as_text(value) if takes_text(info.annotation) else value
            # pydantic would take `true` for the number 1.
            if isinstance(value, bool) and {int, float}.intersection(options(info.annotation)):
                raise _wrong(key, value, info, origins)
    return clean


def _as_text(value: Any) -> Any:
    """Numbers given where text belongs (`resume: 120`, `NCCL_IB_DISABLE: 1`) are the text that was meant."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _wrong(key: str, value: Any, info: FieldInfo, origins: Origins) -> ConfigError:
    return ConfigError(f"{_given(key, value, origins)}: expected {expected(info.annotation, info.metadata)}")


def _given(key: str, value: Any, origins: Origins) -> str:
    origin = origins.of(key)
    return f"{key} is {value!r}" + ("" if origin == DEFAULT else f" ({origin})")


def _validate(tree: dict[str, Any], origins: Origins) -> Config:
    try:
        return Config.model_validate(tree)
    except ValidationError as e:
        errors = e.errors()
        first = errors[0]
        key = ".".join(str(part) for part in first["loc"])
        info = _field_info(first["loc"])
        if first["type"] == "missing":
            about = f": {info.description}" if info and info.description else ""
            where = f" in {origins.path}" if origins.path else ""
            message = f"{key} is not set{where} and has no default{about}"
        elif first["type"] == "value_error":  # a section's own rule, which says what is wrong
            message = f"{_given(key, first['input'], origins)}: {first['ctx']['error']}" if key else str(first["ctx"]["error"])
        elif info is not None:
            message = str(_wrong(key, first["input"], info, origins))
        else:
            message = f"{_given(key, first['input'], origins)}: {first['msg']}"
        more = f" (and {len(errors) - 1} more such errors)" if len(errors) > 1 else ""
        raise ConfigError(message + more) from e


def _field_info(loc: tuple[int | str, ...]) -> FieldInfo | None:
    """The field at pydantic's error location; of an error inside a mapping, the mapping's field."""
    current: Any = Config
    info: FieldInfo | None = None
    for part in loc:
        if isinstance(current, type) and issubclass(current, Section) and part in current.model_fields:
            info = current.model_fields[str(part)]
            current = info.annotation
        elif get_origin(current) is list:
            current = get_args(current)[0]
            if not section_of(current):
                break
        else:
            break
    return info
