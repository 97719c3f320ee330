"""Reads the options of a training command out of a shell script, without running anything.

Understood is what launch scripts are made of: ``NAME=value`` and ``export NAME=value``, ``$NAME``, ``${NAME}``, ``${NAME:-default}``,
``$((arithmetic))``, quotes, comments, continued lines, arrays ``NAME=( words )``, and ``\\$NAME``, which such scripts expand later with
``eval``. What cannot be known without running the script (the output of a command, a variable that is set inside ``if``, a loop or
a function) makes the words that depend on it :class:`Unknown`, each with its reason; nothing is guessed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\+?=")
_OPENS = {"if", "for", "while", "until", "case", "select", "{"}
_CLOSES = {"fi", "done", "esac", "}"}
_SEPARATORS = "\n;&|"
_ARITHMETIC: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.Div: operator.floordiv, ast.FloorDiv: operator.floordiv,
}  # fmt: skip


class Unknown(Exception):
    """A value that only running the script could tell; the reason is its text. ``word``: the word that it belongs to, as it stands there."""

    def __init__(self, reason: str, word: str = ""):
        super().__init__(reason)
        self.word = word


@dataclass(frozen=True)
class Word:
    """A word as it stands in the script (quotes removed, nothing expanded), and its line."""

    text: str
    line: int


@dataclass
class Command:
    """One simple command, or one array: its words, expanded where that was possible.

    ``words``: (text as expanded, or the reason why it could not be; line). ``settings``: assignments before the command.
    """

    words: list[tuple[str | Unknown, int]] = field(default_factory=list)
    settings: dict[str, str | Unknown] = field(default_factory=dict)
    line: int = 0


def commands(text: str, environ: Mapping[str, str]) -> tuple[list[Command], dict[str, str | Unknown]]:
    """The commands and arrays of a script in their order, and its variables at the end. ``environ``: variables from outside."""
    variables: dict[str, str | Unknown] = dict(environ)
    depth = 0
    found: list[Command] = []
    for statement in _statements(text):
        words = [word for word in statement if isinstance(word, Word)]
        first = words[0].text if words else ""
        if first in _OPENS or first.endswith("()") or first == "function" or (words and words[-1].text == "{"):
            depth += 1
        if first in _CLOSES:
            depth = max(0, depth - 1)
        # `then NAME=x`, `do NAME=x`: the keyword is no command.
        while statement and isinstance(statement[0], Word) and statement[0].text in ("then", "do", "else", "!", "time", "exec", "nohup"):
            statement = statement[1:]
        command = _command(statement, variables, depth)
        if command.words:
            found.append(command)
    return found, variables


def _command(statement: list[Word | _Array], variables: dict[str, str | Unknown], depth: int) -> Command:
    command = Command(line=statement[0].line if statement else 0)
    rest = list(statement)
    exported = bool(rest) and isinstance(rest[0], Word) and rest[0].text in ("export", "declare", "local", "readonly", "typeset")
    if exported:
        rest = rest[1:]
    settings: dict[str, str | Unknown] = {}
    while rest:
        part = rest[0]
        if isinstance(part, _Array):
            command.words += [(_expanded(word.text, variables), word.line) for word in part.words]
            rest = rest[1:]
            continue
        match = _ASSIGNMENT.match(part.text)
        if not match or "." in part.text[: match.end()]:
            break
        value: str | Unknown = _expanded(part.text[match.end() :], variables)
        if depth and not command.words:
            value = Unknown(f"{match[1]} is set inside an if, a loop or a function (line {part.line})")
        settings[match[1]] = value
        rest = rest[1:]
    if rest and not exported:  # `NAME=x command`: for that command alone
        command.settings = settings
        command.words += [(_expanded(word.text, variables), word.line) for word in rest if isinstance(word, Word)]
    else:
        variables.update(settings)
    return command


# ---------------------------------------- words


@dataclass(frozen=True)
class _Array:
    words: tuple[Word, ...]
    line: int


def _statements(text: str) -> Iterator[list[Word | _Array]]:
    """Words of each statement; ``NAME=( ... )`` is one :class:`_Array`."""
    statement: list[Word | _Array] = []
    array: list[Word] | None = None
    at, line = 0, 1
    while at < len(text):
        c = text[at]
        if text.startswith("\\\n", at):
            at, line = at + 2, line + 1
        elif c == "#":  # after white space: a word is consumed whole below
            at = text.find("\n", at)
            at = len(text) if at < 0 else at
        elif c == ")" and array is not None:
            statement.append(_Array(tuple(array), line))
            array, at = None, at + 1
        elif c in " \t" or (c == "\n" and array is not None):
            line += c == "\n"
            at += 1
        elif c in _SEPARATORS:
            if statement:
                yield statement
            statement, at, line = [], at + 1, line + (c == "\n")
        else:
            word, end = _word(text, at)
            if re.fullmatch(r"[A-Za-z_]\w*\+?=", word) and text.startswith("(", end):
                array, at = [], end + 1
                continue
            (statement if array is None else array).append(Word(word, line))
            line += text.count("\n", at, end)
            at = end
    if statement:
        yield statement


def _word(text: str, at: int) -> tuple[str, int]:
    """The word that begins at ``at``, quotes removed, and where it ends. ``\\$`` becomes ``$``: such scripts expand it with eval."""
    word, begun = "", at
    quote = ""
    while at < len(text):
        c = text[at]
        if quote and c == quote:
            quote = ""
        elif not quote and c in "'\"":
            quote = c
        elif c == "\\" and quote != "'" and at + 1 < len(text):
            word += "" if text[at + 1] == "\n" else text[at + 1]
            at += 1
        elif c == "$" and quote != "'" and text.startswith(("$(", "${"), at):
            end = _closing(text, at + 1)
            word += text[at:end]
            at = end - 1
        elif not quote and (c in " \t\n;&|" or (c == ")" and not word.endswith("(")) or (c == "(" and word.endswith("="))):
            break
        else:
            word += c
        at += 1
    return word, max(at, begun + 1)


def _closing(text: str, at: int) -> int:
    """One past the bracket that closes the one at ``at``."""
    pairs, depth = {"(": ")", "{": "}"}, []
    while at < len(text):
        if text[at] in pairs:
            depth.append(pairs[text[at]])
        elif depth and text[at] == depth[-1]:
            depth.pop()
            if not depth:
                return at + 1
        at += 1
    return len(text)


# ---------------------------------------- expansion


def _expanded(text: str, variables: Mapping[str, str | Unknown]) -> str | Unknown:
    try:
        return expand(text, variables)
    except Unknown as reason:
        return Unknown(str(reason), text)


def expand(text: str, variables: Mapping[str, str | Unknown], nested: int = 0) -> str:
    """``text`` with its ``$`` expanded. Raises :class:`Unknown`."""
    if nested > 20:
        raise Unknown(f"{text[:40]!r} expands without end")
    result, at = "", 0
    while at < len(text):
        dollar = text.find("$", at)
        if dollar < 0 or dollar + 1 >= len(text):
            return result + text[at:]
        result, at = result + text[at:dollar], dollar + 1
        name = _NAME.match(text, at)
        if text.startswith("((", at):
            end = _closing(text, at)
            result += str(_arithmetic(text[at + 2 : end - 2], variables, nested))
        elif text.startswith("(", at):
            end = _closing(text, at)
            raise Unknown(f"it is the output of a command, ${text[at:end]}")
        elif text.startswith("{", at):
            end = _closing(text, at)
            result += _braces(text[at + 1 : end - 1], variables, nested)
        elif name:
            end = name.end()
            result += _variable(name[0], variables, nested)
        else:
            raise Unknown(f"${text[at : at + 1]} is known only while the script runs")
        at = end
    return result


def _braces(inner: str, variables: Mapping[str, str | Unknown], nested: int) -> str:
    match = re.fullmatch(r"([A-Za-z_]\w*)(?::?-(.*))?", inner, re.S)
    if not match:
        raise Unknown(f"${{{inner}}} is not understood")
    if match[2] is not None and not variables.get(match[1]):
        return expand(match[2].strip("\"'"), variables, nested + 1)
    return _variable(match[1], variables, nested)


def _variable(name: str, variables: Mapping[str, str | Unknown], nested: int) -> str:
    if name not in variables:
        raise Unknown(f"${name} is set neither in the script nor outside")
    value = variables[name]
    if isinstance(value, Unknown):
        raise value
    return expand(value, variables, nested + 1) if "$" in value else value


def _arithmetic(text: str, variables: Mapping[str, str | Unknown], nested: int) -> int:
    expanded = expand(text, variables, nested + 1)
    expanded = _NAME.sub(lambda name: _variable(name[0], variables, nested), expanded)  # $((A * B)) needs no dollars
    try:
        return _number(ast.parse(expanded.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, KeyError, RecursionError, MemoryError) as error:
        raise Unknown(f"$(({text})) is not understood") from error


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if isinstance(node, ast.BinOp):
        return _ARITHMETIC[type(node.op)](_number(node.left), _number(node.right))
    raise KeyError(type(node).__name__)
