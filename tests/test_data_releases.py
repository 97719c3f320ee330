"""``everstep data``: small files in the formats of the original releases, from a folder and from a real server."""

from __future__ import annotations

import functools
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.runs import DEMO, ROOT, config

from everstep import cli, data
from everstep.data import releases
from everstep.data.source import load_records
from everstep.errors import BadInput
from everstep.rl.reward_functions import math_verify, number_match


@pytest.fixture
def originals(tmp_path: Path) -> Path:
    """gsm8k with a line separator inside a text (which is no end of a line), deepscaler with and without a solution."""
    folder = tmp_path / "originals"
    folder.mkdir()
    for split, count in (("train", 3), ("test", 2)):
        lines = [
            {"question": f"{split}\u2028 {i} plus 1,000?", "answer": f"{i} + 1000 = <<{i}+1000={i + 1000}>>\n#### {i + 1000:,}"} for i in range(count)
        ]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
    problems = [
        {"problem": "Half of $x$?", "answer": "\\frac{x}{2}", "solution": "Divide."},
        {"problem": "2^5?", "answer": "32", "solution": ""},
    ]
    (folder / "deepscaler.json").write_text(json.dumps(problems))
    pq.write_table(pa.Table.from_pylist([{"id": 60, "problem": "A?", "answer": "204", "solution": "s"}]), folder / "aime_2024.parquet")
    return folder


@pytest.fixture
def server(originals: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def end_headers(self) -> None:
            if self.path.startswith("/short/"):  # announces more than comes
                self.send_header("Content-Length", "9999999")
            super().end_headers()

        def send_head(self):  # type: ignore[no-untyped-def]
            if self.path.startswith("/short/"):
                self.send_response(200)
                self.end_headers()
                return (originals / "train.jsonl").open("rb")
            return super().send_head()

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(originals)))
    (thread := threading.Thread(target=httpd.serve_forever)).start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_gsm8k_in_verls_layout(originals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert cli.run(["data", "gsm8k", str(originals), str(out)]) == 0
    assert capsys.readouterr().out == f"{out}/train.parquet: 3 records\n{out}/test.parquet: 2 records\n"
    assert sorted(path.name for path in out.iterdir()) == ["test.parquet", "train.parquet"]
    rows = load_records(str(out / "train.parquet"), {})
    assert rows[2] == {
        "data_source": "openai/gsm8k",
        "prompt": [{
            "role": "user",
            "content": 'train\u2028 2 plus 1,000? Let\'s think step by step and output the final answer after "####".',
        }],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1002"},
        "extra_info": {
            "split": "train", "index": 2, "question": "train\u2028 2 plus 1,000?", "answer": "2 + 1000 = <<2+1000=1002>>\n#### 1,002",
        },
    }
    assert number_match("", "so\n#### 1,002", rows[2], extract="hashes") == 1


def test_what_was_converted_can_be_trained_on(originals: Path, tmp_path: Path) -> None:
    """Read, templated and tokenized as a run does it, with the built-in reward."""
    releases.convert("gsm8k", str(originals), tmp_path / "out")
    conf = config(DEMO, tmp_path / "run", f"data.source={tmp_path}/out/train.parquet", f"data.eval_source={tmp_path}/out/test.parquet",
                  "data.eval_source_args={}", "data.max_prompt_tokens=512", "data.max_tokens=512", "warmup.steps=0", "faults=[]",
                  "reward.function=math_verify", f"model.path={ROOT}/examples/models/tiny-qwen3", "data.columns={truth: reward_model.ground_truth}")
    prepared = data.check(conf)
    assert len(prepared.train) == 3 and prepared.eval is not None and len(prepared.eval) == 2
    record = prepared.train.samples[0].columns["record"]
    assert record["truth"] == "1000" and math_verify("", "It is 1000.", record) == 1


def test_deepscaler_from_a_server(server: str, tmp_path: Path) -> None:
    assert releases.convert("deepscaler", server, tmp_path / "out") == {"train": 2, "test": 1}
    first, second = load_records(str(tmp_path / "out" / "train.parquet"), {})
    assert first["prompt"][0]["content"] == "Half of $x$? Let's think step by step and output the final answer within \\boxed{}."
    assert first["reward_model"] == {"style": "rule", "ground_truth": "\\frac{x}{2}"} and first["extra_info"]["answer"] == "Divide."
    assert second["extra_info"] == {"split": "train", "index": 1, "question": "2^5?", "answer": ""}
    assert load_records(str(tmp_path / "out" / "test.parquet"), {})[0]["reward_model"]["ground_truth"] == "204"


def test_without_input_the_published_files_are_downloaded(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the addresses in the table, which lead here to the local server."""
    published = releases.RELEASES["gsm8k"]
    assert all(address.startswith("https://raw.githubusercontent.com/openai/") for _, address in published.files.values())
    here = {split: (file, f"{server}/{file}") for split, (file, _) in published.files.items()}
    monkeypatch.setitem(releases.RELEASES, "gsm8k", releases.Release(here, published.source, published.convert, published.instruction))
    assert cli.run(["data", "gsm8k", str(tmp_path / "out")]) == 0
    assert len(load_records(str(tmp_path / "out" / "train.parquet"), {})) == 3


def test_what_cannot_be_had_is_said_and_leaves_nothing(server: str, originals: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(BadInput, match="everstep data knows gsm8k, deepscaler, not 'gsm9k'"):
        releases.convert("gsm9k", None, out)
    with pytest.raises(BadInput, match=r"INPUT is a folder with the original files \(train\.jsonl\)"):
        releases.convert("gsm8k", str(tmp_path / "nowhere"), out)
    with pytest.raises(BadInput, match=r"/none/train\.jsonl cannot be downloaded \(HTTP Error 404"):
        releases.convert("gsm8k", f"{server}/none", out)
    with pytest.raises(BadInput, match=r"a b/train\.jsonl cannot be downloaded"):
        releases.convert("gsm8k", f"{server}/a b", out)
    with pytest.raises(BadInput, match=r"cannot be downloaded|bytes came"):
        releases.convert("gsm8k", f"{server}/short", out)
    (originals / "test.jsonl").write_text('{"question": "a", "answer": "no mark"}\n')
    with pytest.raises(BadInput, match=r"record 0 of test\.jsonl is not one of openai/gsm8k"):
        releases.convert("gsm8k", str(originals), out)
    (originals / "aime_2024.parquet").write_bytes(b"not parquet")
    with pytest.raises(BadInput, match=r"is not the release's aime_2024\.parquet"):
        releases.convert("deepscaler", str(originals), out)
    assert not out.exists()
    (tmp_path / "file").write_text("")
    (originals / "test.jsonl").write_text((originals / "train.jsonl").read_text())
    with pytest.raises(BadInput, match="is not a folder"):
        releases.convert("gsm8k", str(originals), tmp_path / "file")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "train.partial").mkdir()  # in the way, also of root
    with pytest.raises(BadInput, match=r"full cannot be written \(.*\); give another folder"):
        releases.convert("gsm8k", str(originals), tmp_path / "full")
