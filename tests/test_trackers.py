"""Trackers with the real libraries: TensorBoard, Weights & Biases offline, MLflow with a folder; and one that fails."""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.support.runs import DEMO, config

from everstep.errors import BadInput
from everstep.telemetry import trackers
from everstep.telemetry.metrics import Metrics, read_metrics
from everstep.telemetry.trackers import Guarded, SampleRow, check_trackers, open_trackers

ROWS = [SampleRow("0/1#0", "314>", "1|3\n4", 0.5), SampleRow("0/2#0", "<b>", "x", -1.0)]


def opened(tmp_path: Path, *overrides: str, from_step: int = 0) -> tuple[Metrics, list[tuple[str, str]]]:
    failures: list[tuple[str, str]] = []
    conf = config(DEMO, tmp_path, "telemetry.project=a project", *overrides)
    return Metrics(tmp_path, open_trackers(conf, tmp_path, from_step, lambda *told: failures.append(told))), failures


def test_tensorboard_has_curves_and_samples(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics, failures = opened(tmp_path, "telemetry.tensorboard=true")
    metrics.log(1, {"train/loss": 2.5})
    metrics.log(2, {"train/loss": 2.0})
    metrics.samples(2, ROWS)
    metrics.close()
    metrics, _ = opened(tmp_path, "telemetry.tensorboard=true", from_step=1)  # an attempt that goes on after step 1
    metrics.log(2, {"train/loss": 1.0})
    metrics.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(p.step, p.value) for p in board.Scalars("train/loss")] == [(1, 2.5), (2, 1.0)] and not failures


def test_the_table_of_samples(tmp_path: Path) -> None:
    """As text in TensorBoard, with what Markdown would take for marks escaped, and as parquet under the run's folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics, _ = opened(tmp_path, "telemetry.tensorboard=true")
    metrics.samples(7, ROWS)
    metrics.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    (point,) = board.Tensors("samples/text_summary")
    text = point.tensor_proto.string_val[0].decode()
    assert point.step == 7 and "| 314\\> | 1\\|3<br>4 | 0.5 |" in text and "\\<b\\>" in text
    assert pq.read_table(tmp_path / "samples" / "step-000007.parquet").to_pylist() == [
        {"sample_id": "0/1#0", "prompt": "314>", "completion": "1|3\n4", "reward": 0.5},
        {"sample_id": "0/2#0", "prompt": "<b>", "completion": "x", "reward": -1.0},
    ]
    assert [p.name for p in (tmp_path / "samples").iterdir()] == ["step-000007.parquet"]


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for attempt in range(2):
        metrics, failures = opened(tmp_path, "telemetry.wandb=true")
        metrics.log(attempt + 1, {"train/loss": 2.5 + attempt})
        metrics.samples(attempt + 1, ROWS)
        metrics.close()
        assert not failures
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and {file.name for file in files} == {f"run-{(tmp_path / 'wandb' / 'run_id').read_text()}.wandb"}  # one run
    needles = [b"train/loss", b"samples"]

    def written() -> bool:
        contents = [file.read_bytes() for file in files]
        both = all(needle in content for content in contents for needle in needles)
        return both and all(any(number in content for content in contents) for number in (b"2.5", b"3.5"))

    end = time.monotonic() + 30.0  # wandb's own process writes, and may be behind
    while not written() and time.monotonic() < end:
        time.sleep(0.1)
    assert written()


def test_mlflow_with_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for attempt in range(2):
        metrics, failures = opened(tmp_path, "telemetry.mlflow=true")
        metrics.log(attempt + 1, {"val-core/acc/mean@1": 0.25 + attempt})
        metrics.samples(attempt + 1, ROWS)
        metrics.close()
        assert not failures
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("a project")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == tmp_path.name and run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "val-core/acc/mean_at_1")
    assert [(p.step, p.value) for p in history] == [(1, 0.25), (2, 1.25)]
    assert {f.path for f in client.list_artifacts(run.info.run_id, "samples")} == {"samples/step-000001.parquet", "samples/step-000002.parquet"}
    assert "config/rl.json" in {f.path for f in client.list_artifacts(run.info.run_id, "config")}


def test_a_tracker_that_fails_is_told_once_and_left_out(tmp_path: Path) -> None:
    class Breaks:
        name = "mine"

        def __init__(self) -> None:
            self.calls = 0

        def log(self, step: int, values: object) -> None:
            self.calls += 1
            raise ConnectionError("the server is gone")

        def samples(self, *args: object) -> None:
            self.calls += 1

        def close(self) -> None:
            self.calls += 1

    inner, told = Breaks(), []
    with Metrics(tmp_path, [Guarded(inner, lambda *what: told.append(what))]) as metrics:
        for step in (1, 2):
            metrics.log(step, {"train/loss": 1.0})
        metrics.samples(2, ROWS)
    assert told == [("mine", "ConnectionError: the server is gone")] and inner.calls == 1
    assert len(read_metrics(metrics.path)) == 2


def test_one_that_cannot_be_opened_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")  # nobody listens there
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    metrics, failures = opened(tmp_path, "telemetry.mlflow=true")
    metrics.log(1, {"train/loss": 1.0})
    metrics.close()
    assert [name for name, _ in failures] == ["mlflow"] and "127.0.0.1" in failures[0][1]


def test_a_missing_package_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(trackers._PACKAGES, "wandb", "wandb")
    with pytest.raises(BadInput, match=r"telemetry.wandb=true needs the package wandb") as error:
        check_trackers(config(DEMO, tmp_path, "telemetry.wandb=true"))
    assert error.value.exit_code == 2
    check_trackers(config(DEMO, tmp_path))
