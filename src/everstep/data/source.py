"""Where records come from. A record is a dict; what it must hold depends on ``data.format`` (see ``prepare``).

PATH.parquet          one row, one record
PATH.jsonl            one line, one record; .jsonl.gz and the like too
reasoning_gym:TASK    a generated, verifiable task of the package reasoning-gym
module:function       your function; called with data.source_args, returns a list of dicts

PATH may hold * (files in the order of their names), and be an address that fsspec knows: s3://bucket/train-*.parquet.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everstep.data.functions import check_arguments, load_function
from everstep.errors import BadInput

Record = dict[str, Any]

REASONING_GYM = "reasoning_gym:"

# Arguments of a reasoning_gym source that are ours and not the task's.
_INSTRUCTION = "instruction"
_AS_TEXT = "as_text"


def load_records(spec: str, args: dict[str, Any], key: str = "data.source") -> list[Record]:
    """All records of a source. ``key`` is the configuration key that holds ``spec``, ``key``_args that of ``args``.

    BadInput if the source does not exist, cannot be read, refuses its arguments, or has no records.
    """
    if spec.startswith(REASONING_GYM):
        records = _generated(spec, args, key)
    elif is_path(spec):
        records = _files(spec, args, key)
    else:
        function = load_function(spec, key)
        check_arguments(function, 0, args, spec, key, f"{key}_args")
        try:
            records = function(**args)
        except BadInput:
            raise
        except Exception as error:  # a fault boundary: user code
            raise BadInput(f"{key}={spec} raised {type(error).__name__}: {error}") from error
        if not isinstance(records, list):
            raise BadInput(f"{key}={spec} returned a {type(records).__name__}; it must return a list of dicts")
    if not records:
        raise BadInput(f"{key}={spec} has no records")
    for number, record in enumerate(records):
        if not isinstance(record, dict):
            raise BadInput(f"{key}={spec}: record {number} is a {type(record).__name__}; records must be dicts")
    return records


def is_path(spec: str) -> bool:
    """Whether a source is a file, not a task or a function."""
    return not spec.startswith(REASONING_GYM) and ("/" in spec or Path(spec).suffix in _FILE_SUFFIXES or Path(spec).exists())


_FILE_SUFFIXES = {".parquet", ".json", ".jsonl", ".csv", ".arrow", ".txt", ".gz", ".zst"}


def with_columns(records: list[Record], columns: Mapping[str, str], key: str = "data.source") -> list[Record]:
    """Records in which the field NAME of ``columns`` (data.columns) is also what they have at PATH, ``a.b`` for b inside a.

    BadInput for a record that has nothing there.
    """

    def found(number: int, record: Record, path: str) -> Any:
        value: Any = record
        for part in path.split("."):
            if not isinstance(value, dict) or value.get(part) is None:
                raise BadInput(f"{key}: record {number} has nothing at {path!r} (data.columns); it has {sorted(record)}")
            value = value[part]
        return value

    return [{**record, **{name: found(i, record, path) for name, path in columns.items()}} for i, record in enumerate(records)]


def _files(spec: str, args: dict[str, Any], key: str) -> list[Record]:
    import fsspec
    import pyarrow
    import pyarrow.parquet

    if args:
        raise BadInput(f"{key}_args={args}: a file takes no arguments; remove {key}_args")
    advice = "give a .parquet or .jsonl file, reasoning_gym:TASK or module:function"
    remote = "://" in spec
    where = spec if remote else str(Path(spec).expanduser().absolute())
    try:
        filesystem, path = fsspec.core.url_to_fs(where)
        paths = sorted(filesystem.glob(path)) if "*" in path else [path]
        for one in paths:
            if not filesystem.isfile(one):
                what = "is not a file" if filesystem.exists(one) else "does not exist"
                raise BadInput(f"{key}={spec} {what} ({one}); {advice}")
    except BadInput:
        raise
    except Exception as error:  # a fault boundary: libraries of every kind of storage
        raise BadInput(f"{key}={spec} cannot be reached: {type(error).__name__}: {error}") from error
    if not paths:
        raise BadInput(f"{key}={spec}: no file has such a name; {advice}")
    records: list[Record] = []
    for one in paths:
        name = one.removesuffix(".gz").removesuffix(".zst")
        if not name.endswith((".parquet", ".jsonl")):
            raise BadInput(f"{key}={spec}: {one} cannot be read as parquet or JSON lines; {advice}")
        try:
            with filesystem.open(one, "rb", compression="infer") as file:
                if name.endswith(".parquet"):
                    records += pyarrow.parquet.read_table(file).to_pylist()
                else:
                    records += _json_lines(file, f"{key}={spec}: {one}" if len(paths) > 1 else f"{key}={spec}")
        except BadInput:
            raise
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise BadInput(f"{key}={spec} cannot be read as {Path(name).suffix[1:]} ({reason}); convert it, or name a module:function") from error
        except Exception as error:  # a fault boundary, as above
            raise BadInput(f"{key}={spec} cannot be read: {type(error).__name__}: {error}") from error
    return records


def _json_lines(file: Any, where: str) -> list[Record]:
    records = []
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                records.append(json.loads(line))
            except ValueError as error:
                raise BadInput(f"{where}: line {number} is not JSON: {error}") from error
    return records


def _generated(spec: str, args: dict[str, Any], key: str) -> list[Record]:
    """Records {prompt, question, answer, metadata} of a reasoning_gym task.

    ``args`` are those of the task, with ``size`` and ``seed``, and two of ours: ``instruction`` is put after the question
    (say, how to write the answer); ``as_text=true`` makes the prompt a plain string instead of a chat message, for models
    without a chat template.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise BadInput(f"{key}={spec} needs the package reasoning-gym (pip install 'everstep[smollm2]')") from error
    task = spec.removeprefix(REASONING_GYM)
    if task not in DATASETS:
        close = difflib.get_close_matches(task, DATASETS, n=1)
        hint = f"; did you mean {REASONING_GYM}{close[0]}?" if close else ""
        raise BadInput(f"{key}={spec}: reasoning_gym has no task {task!r}{hint}")
    args = dict(args)
    instruction, as_text = args.pop(_INSTRUCTION, ""), args.pop(_AS_TEXT, False)
    try:
        entries = list(reasoning_gym.create_dataset(task, **args))
    except Exception as error:  # a fault boundary: tasks check their arguments with assertions of many kinds
        raise BadInput(f"{key}={spec} refuses {key}_args={args}: {error or type(error).__name__}") from error
    records = []
    for entry in entries:
        question = f"{entry['question']}\n{instruction}" if instruction else entry["question"]
        prompt = question if as_text else [{"role": "user", "content": question}]
        records.append({**entry, "prompt": prompt})
    return records
