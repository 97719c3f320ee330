"""The manual: it is built without a warning, and the code in it does what the pages say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from everstep.cluster.batch import TrainingBatch
from everstep.config.load import load_config
from everstep.plan import make_plan
from everstep.rl import pipeline as pipelines

ROOT = Path(__file__).parent.parent
DEMO = str(ROOT / "examples" / "grpo_sort.yaml")


def code(page: str) -> dict[str, str]:
    """Python blocks of a page that begin with a comment of their file's name."""
    blocks = re.findall(r"^```python\n# (\S+\.py)\n(.*?)^```", (ROOT / "docs" / page).read_text(), flags=re.M | re.S)
    return dict(blocks)


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Strict: a page that the navigation lacks, a link or an anchor that leads nowhere."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"README"} | {"index"}
    assert pages <= {path.stem for path in tmp_path.glob("*.html")}
    assert "mermaid" in (tmp_path / "concepts.html").read_text()


def test_the_reward_and_the_algorithm_of_the_manual_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = code("extending.md")
    assert set(written) == {"my_rewards.py", "my_algorithm.py"}
    for name, text in written.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = load_config(DEMO, ["reward.function=my_rewards:length_and_answer", "pipeline=my_algorithm:pipeline", f"model.path={ROOT}/examples/models/tiny-qwen3"])
    make_plan(config)  # what `everstep plan` would refuse
    import my_algorithm
    import my_rewards

    stage = pipelines.resolve(config).named("advantages")
    assert stage.function is my_algorithm.centred and stage.reads == ("scores", "loss_mask")
    samples = TrainingBatch({"scores": torch.tensor([1.0, 3.0]), "loss_mask": torch.tensor([[1, 1], [1, 0]])}, {}, ["a", "b"])
    assert my_algorithm.centred(None, samples)["advantages"].tolist() == [[-1.0, -1.0], [1.0, 0.0]]
    assert my_rewards.length_and_answer("p", "the answer is 7", {"answer": "7"}) == 1.0


def test_events_that_the_runbook_names_exist() -> None:
    from everstep.telemetry.events import EVENTS

    named = set(re.findall(r"`(\w+)` events?\b", (ROOT / "docs" / "runbook.md").read_text()))
    assert named and named <= set(EVENTS)


def test_mermaid_diagrams_begin_as_diagrams_do() -> None:
    blocks = re.findall(r"^```mermaid\n(\w+)", (ROOT / "docs" / "concepts.md").read_text(), flags=re.M)
    assert len(blocks) >= 4 and set(blocks) <= {"flowchart", "sequenceDiagram"}
