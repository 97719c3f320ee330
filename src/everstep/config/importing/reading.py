"""From a file of another system, or overrides, to ``{option: value}``. Files are read, never run."""

from __future__ import annotations

import ast
import re
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from everstep.config.importing import shell
from everstep.config.importing.shell import Unknown
from everstep.config.load import COMMAND_LINE
from everstep.errors import BadInput, first_line

_OVERRIDE = re.compile(r"\+{0,2}~?([A-Za-z_$][\w.]*)=(.*)", re.S)


@dataclass
class Found:
    """What was given: values by option name, where from; and options whose value could not be told, with the reason."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)

    def put(self, name: str, value: Any, origin: str) -> None:
        if isinstance(value, Unknown):
            self.unknown[name] = f"{value} ({origin})"
            return
        self.unknown.pop(name, None)
        self.values[name], self.origins[name] = value, origin


def read(system: ModuleType, arguments: Sequence[str], environ: Mapping[str, str]) -> Found:
    """``arguments``: perhaps a file, then overrides, which win. ``BadInput`` if a file cannot be read or holds no options."""
    found, rest = Found(), list(arguments)
    if rest and not rest[0].startswith("-") and "=" not in rest[0]:
        path = Path(rest.pop(0)).expanduser()
        _file(system, path, found, environ)
    _words([(word, 0) for word in rest], "", found, lambda line: COMMAND_LINE)
    if not found.values and not found.unknown:
        raise BadInput(f"there is no option of {system.TITLE} in {' '.join(arguments) or 'nothing'}; give a file, or options as KEY=VALUE")
    return found


def _file(system: ModuleType, path: Path, found: Found, environ: Mapping[str, str]) -> None:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read: {error.strerror if isinstance(error, OSError) else 'it is no text'}") from error
    try:
        match path.suffix:
            case ".yaml" | ".yml":
                tree = yaml.safe_load(text)
                _tree(tree if isinstance(tree, dict) else {}, "", found, str(path))
            case ".toml":
                _tree(tomllib.loads(text), "", found, str(path))
            case ".py":
                with warnings.catch_warnings(action="ignore"):  # of another's code
                    module = ast.parse(text)
                _python(module, found, str(path))
            case _:
                _script(system, text, found, str(path), environ)
    except (yaml.YAMLError, tomllib.TOMLDecodeError, SyntaxError, RecursionError, MemoryError, ValueError) as error:
        raise BadInput(f"{path} is not valid: {first_line(error)}") from error


def _tree(tree: Mapping[str, Any], prefix: str, found: Found, origin: str) -> None:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            _tree(value, f"{prefix}{name}.", found, origin)
        elif isinstance(value, str) and value.startswith("${"):
            found.put(f"{prefix}{name}", Unknown(f"it is taken from elsewhere, {value}"), origin)
        else:
            found.put(f"{prefix}{name}", value, origin)


# ---------------------------------------- shell


def _script(system: ModuleType, text: str, found: Found, path: str, environ: Mapping[str, str]) -> None:
    every, variables = shell.commands(text, environ)
    training = [command for command in every if any(mark in str(word) for word, _ in command.words for mark in system.COMMANDS)]
    if not training:
        raise BadInput(f"{path}: no command in it runs {' or '.join(system.COMMANDS) or system.TITLE}")
    for command in training:
        prefix = next((p for mark, p in system.PREFIXES.items() if any(mark in str(word) for word, _ in command.words)), "")
        for name, option in system.ENVIRONMENT.items():
            value = command.settings.get(name, variables.get(name) if name not in environ else None)
            if value is not None:
                found.put(option, _value(value), f"{path}:{command.line}")
        _words(command.words, prefix, found, lambda line: f"{path}:{line}")


def _words(words: Sequence[tuple[str | Unknown, int]], prefix: str, found: Found, origin: Any) -> None:
    """``a.b=c``, ``--a.b=c``, ``--a.b c`` and flags; other words are none of ours."""
    rest = list(words)
    while rest:
        word, line = rest.pop(0)
        if isinstance(word, Unknown):
            if name := re.match(r"(?:--)?([\w.]+)=", word.word):
                found.put(prefix + name[1], word, origin(line))
        elif word.startswith("--"):
            name_, equals, raw = word[2:].partition("=")
            following = rest[0][0] if rest else None
            if not equals and following is not None and not str(following).startswith("--") and not _OVERRIDE.match(str(following)):
                raw = rest.pop(0)[0]  # type: ignore[assignment]
                equals = "="
            found.put(prefix + name_.replace("-", "_"), _value(raw) if equals else True, origin(line))
        elif match := _OVERRIDE.fullmatch(word):
            found.put(prefix + match[1], _value(match[2]), origin(line))


def _value(raw: str | Unknown) -> Any:
    """Text as YAML, in Hydra's and our own way: ``1e-6`` is a number."""
    if isinstance(raw, Unknown) or raw == "":
        return raw
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={raw}"]))["value"]  # type: ignore[call-overload, index]
    except (OmegaConfBaseException, yaml.YAMLError, ValueError):
        return raw


# ---------------------------------------- Python


def _python(module: ast.Module, found: Found, path: str) -> None:
    constants: dict[str, ast.expr] = {}
    for statement in module.body:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
            constants[statement.targets[0].id] = statement.value
    classes = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
    if "Config" in classes:
        for name, value, line in _fields(classes, "Config", ""):
            found.put(name, _literal(value, constants), f"{path}:{line}")
    for call in (node for node in ast.walk(module) if isinstance(node, ast.Call)):
        called = call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id if isinstance(call.func, ast.Name) else ""
        prefix = {"initialize": "", "from_sizes": "global_device_mesh."}.get(called)
        for keyword in call.keywords if prefix is not None else []:
            if keyword.arg == "global_device_mesh" or keyword.arg is None:
                continue  # its sizes are options of their own
            value = _literal(keyword.value, constants)
            if isinstance(value, dict):
                _tree(value, f"{prefix}{keyword.arg}.", found, f"{path}:{call.lineno}")
            else:
                found.put(f"{prefix}{keyword.arg}", value, f"{path}:{call.lineno}")


def _fields(classes: Mapping[str, ast.ClassDef], name: str, prefix: str) -> Iterator[tuple[str, ast.expr, int]]:
    """(dotted name, default, line) of a dataclass and of those in its fields."""
    for node in classes[name].body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name) or node.value is None:
            continue
        inner = next((k.value.id for k in getattr(node.value, "keywords", []) if k.arg == "default_factory" and isinstance(k.value, ast.Name)), "")
        if inner in classes:
            yield from _fields(classes, inner, f"{prefix}{node.target.id}.")
        elif isinstance(node.value, ast.Call):  # field(default_factory=lambda: [...])
            made = next((k.value.body for k in node.value.keywords if isinstance(k.value, ast.Lambda)), node.value)
            yield f"{prefix}{node.target.id}", made, node.lineno
        else:
            yield f"{prefix}{node.target.id}", node.value, node.lineno


def _literal(node: ast.expr, constants: Mapping[str, ast.expr]) -> Any:
    if isinstance(node, ast.Name) and node.id in constants:
        node = constants[node.id]
    try:
        return ast.literal_eval(node)
    except ValueError:
        return Unknown(f"it is computed, {ast.unparse(node)}")
