"""Where metrics go besides ``RUN/metrics.jsonl``: TensorBoard, Weights & Biases, MLflow. Used by the lead process only.

A tracker that fails (a server that is gone, a full account) never stops training: the failure is recorded once, and the
tracker is left out from then on. ``metrics.jsonl`` and the event log have everything in any case.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from everstep.config.schema import Config
from everstep.errors import BadInput


@dataclass(frozen=True)
class SampleRow:
    """One row of the table of samples."""

    sample_id: str
    prompt: str
    completion: str
    reward: float


class Tracker(Protocol):
    """Each method may raise anything; ``Guarded`` sees to that."""

    name: str

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics of a global step."""

    def samples(self, step: int, rows: Sequence[SampleRow], file: Path) -> None:
        """Samples that were made before step ``step``; ``file`` has them as parquet."""

    def close(self) -> None: ...


_STEP = "training/global_step"


class TensorBoard:
    """Curves and, under "text", samples in ``RUN/tensorboard``; points after ``from_step`` of an earlier attempt are hidden."""

    name = "tensorboard"

    def __init__(self, run_dir: Path, from_step: int = 0):
        from torch.utils.tensorboard import SummaryWriter  # seconds to import

        self._writer: Any = SummaryWriter(str(run_dir / "tensorboard"), purge_step=from_step + 1 if from_step else None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, number in values.items():
            self._writer.add_scalar(name, number, step)
        self._writer.flush()

    def samples(self, step: int, rows: Sequence[SampleRow], file: Path) -> None:
        lines = [f"| {_cell(row.prompt)} | {_cell(row.completion)} | {row.reward:.4g} |" for row in rows]
        self._writer.add_text("samples", "\n".join(["| prompt | completion | reward |", "|---|---|---|", *lines]), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, kept in ``RUN/wandb``; an attempt that resumes goes on with the same run.

    Credentials, entity and the rest are wandb's own environment variables. With WANDB_MODE=offline nothing leaves the machine.
    """

    name = "wandb"

    def __init__(self, config: Config, run_dir: Path):
        import wandb

        self._wandb = wandb
        self._run: Any = wandb.init(
            project=config.telemetry.project, name=run_dir.name, dir=str(run_dir), config=config.model_dump(mode="json"),
            id=_remembered(run_dir / "wandb" / "run_id", lambda: secrets.token_hex(4)), resume="allow", reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("*", step_metric=_STEP)  # wandb's own step may not go back, as that of a run that resumes does

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, _STEP: step})

    def samples(self, step: int, rows: Sequence[SampleRow], file: Path) -> None:
        columns: list[str | int] = list(SampleRow.__dataclass_fields__)
        table = self._wandb.Table(columns=columns, data=[[getattr(row, str(name)) for name in columns] for row in rows])
        self._run.log({"samples": table, _STEP: step})

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """A run of MLflow at MLFLOW_TRACKING_URI, by default in ``RUN/mlruns``; an attempt that resumes goes on with the same run.

    MLflow allows no ``@`` in a name: it is written ``_at_``.
    """

    name = "mlflow"

    def __init__(self, config: Config, run_dir: Path):
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        address = os.environ.get("MLFLOW_TRACKING_URI")
        if not address:
            address = (run_dir / "mlruns").absolute().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions ask for it; the folder needs no server
        self._metric, self._client = Metric, MlflowClient(tracking_uri=address)
        experiment = self._client.get_experiment_by_name(config.telemetry.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(config.telemetry.project)
        file = run_dir / "mlflow_run_id"
        fresh = not file.exists()
        self._id = _remembered(file, lambda: self._client.create_run(number, run_name=run_dir.name).info.run_id)
        if fresh:
            for key, value in config.model_dump(mode="json").items():
                self._client.log_dict(self._id, value if isinstance(value, dict) else {key: value}, f"config/{key}.json")
        else:
            self._client.update_run(self._id, status="RUNNING")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(name.replace("@", "_at_"), number, now, step) for name, number in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def samples(self, step: int, rows: Sequence[SampleRow], file: Path) -> None:
        self._client.log_artifact(self._id, str(file), "samples")

    def close(self) -> None:
        self._client.set_terminated(self._id)


class Guarded:
    """A tracker whose failure is told once, by ``failed(name, reason)``, and then ends it."""

    def __init__(self, tracker: Tracker, failed: Callable[[str, str], None]):
        self.name, self._tracker, self._failed = tracker.name, tracker, failed
        self._alive = True

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._do(lambda: self._tracker.log(step, values))

    def samples(self, step: int, rows: Sequence[SampleRow], file: Path) -> None:
        self._do(lambda: self._tracker.samples(step, rows, file))

    def close(self) -> None:
        self._do(self._tracker.close)

    def _do(self, what: Callable[[], None]) -> None:
        if not self._alive:
            return
        try:
            what()
        except Exception as error:  # a fault boundary: other people's servers
            self._alive = False
            self._failed(self.name, f"{type(error).__name__}: {error}")


_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}


def open_trackers(config: Config, run_dir: Path, from_step: int, failed: Callable[[str, str], None]) -> list[Tracker]:
    """The trackers of section ``telemetry``. One that cannot be opened is told to ``failed`` and left out."""
    makers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoard(run_dir, from_step),
        "wandb": lambda: Wandb(config, run_dir),
        "mlflow": lambda: Mlflow(config, run_dir),
    }
    wanted = {"tensorboard": config.telemetry.tensorboard, "wandb": config.telemetry.wandb, "mlflow": config.telemetry.mlflow}
    trackers: list[Tracker] = []
    for name in (name for name, on in wanted.items() if on):
        try:
            trackers.append(Guarded(makers[name](), failed))
        except Exception as error:  # a fault boundary, as above
            failed(name, f"{type(error).__name__}: {error}")
    return trackers


def check_trackers(config: Config) -> None:
    """BadInput for a tracker whose package is not installed. Imports none of them."""
    import importlib.util

    for name, package in _PACKAGES.items():
        if getattr(config.telemetry, name) and importlib.util.find_spec(name) is None:
            raise BadInput(f"telemetry.{name}=true needs the package {package} (pip install 'everstep[tracking]'); or set it to false")


def write_samples(rows: Sequence[SampleRow], path: Path) -> None:
    """As parquet; whole or not there."""
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([asdict(row) for row in rows]), partial)
    os.replace(partial, path)


def _remembered(file: Path, make: Callable[[], str]) -> str:
    """What an earlier attempt made, or a new one, kept for the next."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(make())
        os.replace(partial, file)
    return file.read_text()


def _cell(text: str) -> str:
    """Text inside a cell of a Markdown table."""
    return "".join("\\" + c if c in "\\|`*_<>[]#" else c for c in text).replace("\n", "<br>")
