"""Where records come from. A record is a dict; what it must hold depends on ``data.format`` (see ``prepare``).

PATH.parquet          one row, one record
reasoning_gym:TASK    a generated, verifiable task of the package reasoning-gym
module:function       your function; called with data.source_args, returns a list of dicts
"""

from __future__ import annotations

import difflib
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
    elif spec.endswith(".parquet") or "/" in spec or Path(spec).suffix in _FILE_SUFFIXES or Path(spec).exists():
        records = _parquet(spec, args, key)
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


_FILE_SUFFIXES = {".json", ".jsonl", ".csv", ".arrow", ".txt", ".gz", ".zst"}


def _parquet(spec: str, args: dict[str, Any], key: str) -> list[Record]:
    import pyarrow
    import pyarrow.parquet

    path = Path(spec).expanduser()
    if args:
        raise BadInput(f"{key}_args={args}: a parquet file takes no arguments; remove {key}_args")
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise BadInput(f"{key}={spec} {what} ({path.absolute()}); give a .parquet file, reasoning_gym:TASK or module:function")
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(f"{key}={spec} cannot be read as parquet ({reason}); convert it, or name a module:function") from error
    return table.to_pylist()


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
