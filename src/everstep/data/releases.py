"""Original releases of data sets into ``train.parquet`` and ``test.parquet``: what ``everstep data NAME [INPUT] OUT`` does.

The layout is verl's, so that files and habits carry over: ``data_source``, ``prompt`` (messages), ``ability``, ``reward_model``
{style, ground_truth} and ``extra_info`` {split, index, question, answer}. Built-in rewards read the ground truth from there.

    gsm8k       grade-school mathematics (arXiv 2110.14168); train.jsonl and test.jsonl of openai/grade-school-math, records
                {question, answer}, the number after #### in the answer
    deepscaler  DeepScaleR-Preview (40 thousand competition problems), deepscaler.json, records {problem, answer, solution};
                its test set is AIME 2024, aime_2024.parquet
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep import scratch
from everstep.data.source import Record
from everstep.errors import BadInput

_TIMEOUT_S = 60.0  # of one read from the network
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Release:
    """A data set: per split the file's name in a folder, and where it is published; and how a record becomes one of ours."""

    files: dict[str, tuple[str, str]]
    source: str  # the field data_source
    convert: Callable[[Record], tuple[str, str, str]]  # (question, whole answer, ground truth)
    instruction: str


def _gsm8k(record: Record) -> tuple[str, str, str]:
    question, answer = record["question"], record["answer"]
    _, mark, truth = answer.rpartition("####")
    if not mark:
        raise ValueError("its answer has no ####")
    return question, answer, truth.strip().replace(",", "")


def _deepscaler(record: Record) -> tuple[str, str, str]:
    return record["problem"], record.get("solution") or "", str(record["answer"])


RELEASES = {
    "gsm8k": Release(
        {
            split: (
                f"{split}.jsonl",
                f"https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/{split}.jsonl",
            )
            for split in ("train", "test")
        },
        "openai/gsm8k",
        _gsm8k,
        'Let\'s think step by step and output the final answer after "####".',
    ),
    "deepscaler": Release(
        {
            "train": (
                "deepscaler.json",
                "https://huggingface.co/datasets/agentica-org/DeepScaleR-Preview-Dataset/resolve/main/deepscaler.json",
            ),
            "test": (
                "aime_2024.parquet",
                "https://huggingface.co/datasets/HuggingFaceH4/aime_2024/resolve/main/data/train-00000-of-00001.parquet",
            ),
        },
        "agentica-org/DeepScaleR-Preview-Dataset",
        _deepscaler,
        "Let's think step by step and output the final answer within \\boxed{}.",
    ),
}


def convert(name: str, given: str | None, out: str | os.PathLike[str]) -> dict[str, int]:
    """Write ``out``/train.parquet and ``out``/test.parquet of the release ``name``; returns the number of records of each split.

    ``given``: a folder with the original files, or the address (http, https) of one; None: they are downloaded from where they
    are published. Both files are whole or not there. BadInput if the name is unknown, or a file cannot be had or is not what it
    should be.
    """
    if name not in RELEASES:
        raise BadInput(f"everstep data knows {', '.join(RELEASES)}, not {name!r}; parquet and JSON lines of your own need no conversion")
    release, folder = RELEASES[name], Path(out).expanduser()
    with scratch.folder("data") as downloads:
        tables = {}
        for split, (file, address) in release.files.items():
            path = _obtain(given, file, address, downloads)
            tables[split] = _converted(release, split, _read(path, file), file)
        if folder.exists() and not folder.is_dir():
            raise BadInput(f"{folder} is not a folder; give one for train.parquet and test.parquet")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return {split: _write(rows, folder / f"{split}.parquet") for split, rows in tables.items()}
        except OSError as error:
            raise BadInput(f"{folder} cannot be written ({error.strerror or error}); give another folder") from error


def _obtain(given: str | None, file: str, address: str, folder: Path) -> Path:
    if given is None:
        return _download(address, folder / file)
    if given.startswith(("http://", "https://")):
        return _download(f"{given.rstrip('/')}/{file}", folder / file)
    path = Path(given).expanduser() / file
    if not path.is_file():
        raise BadInput(f"{path} does not exist; INPUT is a folder with the original files ({file}), or leave it out to download them")
    return path


def _download(address: str, path: Path) -> Path:
    """BadInput unless all bytes that the server announces have come."""
    try:
        with urllib.request.urlopen(address, timeout=_TIMEOUT_S) as response, path.open("wb") as file:
            header = response.headers.get("Content-Length")
            announced = None if header is None else int(header)
            shutil.copyfileobj(response, file, _CHUNK_BYTES)
            written = file.tell()
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        raise BadInput(f"{address} cannot be downloaded ({error}); get the file some other way and give its folder as INPUT") from error
    if announced is not None and announced != written:
        raise BadInput(f"{address}: {written} of {announced} bytes came; try again")
    return path


def _read(path: Path, file: str) -> list[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        if file.endswith(".parquet"):
            return pyarrow.parquet.read_table(path).to_pylist()
        text = path.read_text(encoding="utf-8")
        records: Any = json.loads(text) if file.endswith(".json") else [json.loads(line) for line in text.split("\n") if line.strip()]
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise BadInput(f"{path} is not the release's {file}: {(str(error).splitlines() or ['unreadable'])[0]}") from error
    if not isinstance(records, list) or not records:
        raise BadInput(f"{path} is not the release's {file}: it holds no list of records")
    return records


def _converted(release: Release, split: str, records: list[Record], file: str) -> list[Record]:
    rows = []
    for index, record in enumerate(records):
        try:
            question, answer, truth = release.convert(record)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise BadInput(f"record {index} of {file} is not one of {release.source}: {error!r}") from error
        rows.append(
            {
                "data_source": release.source,
                "prompt": [{"role": "user", "content": f"{question} {release.instruction}"}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": truth},
                "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
            }
        )
    return rows


def _write(rows: list[Record], path: Path) -> int:
    import pyarrow
    import pyarrow.parquet

    partial = path.with_suffix(".partial")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), partial)
    os.replace(partial, path)
    return len(rows)
