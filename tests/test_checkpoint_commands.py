"""``everstep checkpoints`` and ``everstep export`` as a user runs them: what they print, what they refuse, and that what they make is
the model that was trained."""

from __future__ import annotations

import contextlib
import re
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.support.runs import ROOT, SFT, command, config, finish

from everstep import attempt, cli
from everstep.checkpoint import listing
from everstep.checkpoint.manifest import checkpoint_folders, damage, sweep
from everstep.cluster.forked import ForkedHost
from everstep.config import load as config_files
from everstep.data import check
from everstep.errors import BadInput
from everstep.telemetry.metrics import read_metrics
from support import object_stores
from support.checkpoints import flip_a_bit
from support.object_stores import BUCKET
from test_checkpoint import save, shard

pytestmark = pytest.mark.timeout(200)

Said = tuple[int, str]  # exit code, and what was printed


def everstep(capsys: pytest.CaptureFixture[str], *arguments: str) -> Said:
    code = cli.run(list(arguments))
    said = capsys.readouterr()
    return code, re.sub(r"\s+", " ", said.out + said.err)


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with object_stores.s3() as address:
        yield address


# ---------------------------------------------------------------- everstep checkpoints


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Of a run that keeps two checkpoints, and has four."""
    conf = config(SFT, tmp_path / "run", "checkpoint.keep_last=2", "checkpoint.keep_every=0")
    (tmp_path / "run" / "configs").mkdir(parents=True)
    config_files.save(conf, tmp_path / "run" / "configs" / "resolved.yaml")
    for step in (1, 2, 3, 4):
        save(tmp_path / "run" / "checkpoints", step)
    return tmp_path / "run"


def test_checkpoints_lists_verifies_and_prunes(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = run_folder / "checkpoints"
    code, said = everstep(capsys, "checkpoints", str(run_folder))
    assert code == 0 and "step-000004 (latest)" in said and said.count("yes") == 4 and "tp 2" in said
    flip_a_bit(shard(at / "step-000003", 1), -1)
    assert everstep(capsys, "checkpoints", str(run_folder))[0] == 0, "names and sizes are right"
    code, said = everstep(capsys, "checkpoints", str(run_folder), "--verify")
    assert code == 3 and said.count("yes") == 3 and "damaged in" in said

    code, said = everstep(capsys, "checkpoints", str(run_folder), "--prune", "--keep-last", "3", "--keep-every", "2")
    assert [f.name for f in checkpoint_folders(at)] == ["step-000004", "step-000003", "step-000002"]
    assert code == 0 and re.findall(r"deleted \S+/(step-\d+)", said) == ["step-000001"]
    everstep(capsys, "checkpoints", str(at), "--prune", "--keep-last", "2", "--keep-every", "0")  # the folder of the checkpoints itself
    assert [f.name for f in checkpoint_folders(at)] == ["step-000004", "step-000003"]
    save(at, 5)
    everstep(capsys, "checkpoints", str(run_folder), "--prune")  # as configured
    assert [f.name for f in checkpoint_folders(at)] == ["step-000005", "step-000004"]
    flip_a_bit(shard(at / "step-000005", 1), -1)
    code, said = everstep(capsys, "checkpoints", str(run_folder), "--prune", "--keep-last", "1", "--verify")
    assert code == 3 and "deleted" not in said, "the newest is damaged, so the one before it is the only good one"
    assert damage(at / "step-000004") is None


@pytest.mark.parametrize(
    ("pointer", "named", "says"),
    [("latest", "", "names '', which is no checkpoint"), ("latest", "step-000077", "names step-000077, which is not there"),
     ("best", "../x", "names '../x', which is no checkpoint")],
)
def test_a_pointer_to_nothing_is_told_and_hides_no_checkpoint(
    pointer: str, named: str, says: str, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = run_folder / "checkpoints"
    (at / pointer).write_text(named + "\n")
    code, said = everstep(capsys, "checkpoints", str(run_folder))
    assert code == 3 and f"{at / pointer}: {says}" in said and said.count("yes") == 4
    assert everstep(capsys, "checkpoints", str(run_folder), "--prune")[0] in (2, 3) and len(checkpoint_folders(at)) >= 2


def test_a_run_that_saves_elsewhere_now_is_looked_at_there(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It began in its own folder, which has old checkpoints still."""
    conf = config(SFT, run_folder, f"checkpoint.path={tmp_path / 'elsewhere'}")
    config_files.save(conf, run_folder / "configs" / "resolved.yaml")
    save(tmp_path / "elsewhere", 7)
    code, said = everstep(capsys, "checkpoints", str(run_folder))
    assert code == 0 and "step-000007 (latest)" in said and "step-000004" not in said


def test_prune_while_the_run_saves_and_deletes_itself(run_folder: Path) -> None:
    """Both delete the same: neither fails, and what the run is writing stays."""
    at = run_folder / "checkpoints"
    failures: list[BaseException] = []

    def pruning() -> None:
        try:
            while not over.is_set():
                listing.prune(str(run_folder), at, 2, 0)
        except BaseException as error:
            failures.append(error)

    over, pruner = threading.Event(), threading.Thread(target=pruning)
    pruner.start()
    for step in range(5, 15):
        save(at, step, keep_last=2)
        sweep(at)
    over.set()
    pruner.join()
    assert not failures
    assert [(folder.name, damage(folder)) for folder in checkpoint_folders(at)] == [("step-000014", None), ("step-000013", None)]


@pytest.mark.parametrize(
    ("made", "given", "says"),
    [
        ({"recipe": "dpo"}, [], "was made with recipe=dpo, this run has sft"),
        ({"lora": {"rank": 0}}, ["lora.rank=4"], "was made with lora.rank=0, this run has 4"),
        ({"lora": {"rank": 4, "alpha": 8.0}}, ["lora.rank=4"], "was made with lora.alpha=8.0, this run has 16.0"),
        ({"model": {"dtype": "bfloat16"}}, [], "was made with model.dtype=bfloat16, this run has float32"),
    ],
)
def test_what_was_made_otherwise_is_refused_before_anything_is_put_aside(made: dict[str, Any], given: list[str], says: str, run_folder: Path) -> None:
    at = run_folder / "checkpoints"
    (at / "step-000002" / "config.yaml").write_text(yaml.safe_dump(made))
    with pytest.raises(BadInput, match=re.escape(f"step-000002: {says}")):
        attempt.prepare(config(SFT, run_folder, "resume=2", *given), clean=False)
    assert len(checkpoint_folders(at)) == 4 and (at / "latest").read_text() == "step-000004\n" and not (run_folder / "logs").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["RUN/nowhere"], "neither a run folder nor one with checkpoints"),
        (["RUN/configs/resolved.yaml"], "neither a run folder nor one with checkpoints"),
        (["nonsense://x"], "not an address of a folder"),
        (["RUN", "--keep-last", "1"], "say what --prune deletes; add it"),
        (["RUN", "--prune", "--keep-last", "0"], "--keep-last is 0; it must be at least 1"),
        (["RUN", "--prune", "--keep-every", "-1"], "--keep-every is -1; it must be a number of steps"),
        (["RUN/checkpoints", "--prune"], "give --keep-last and --keep-every"),
    ],
)
def test_what_checkpoints_refuses(run_folder: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = everstep(capsys, "checkpoints", *(word.replace("RUN", str(run_folder)) for word in arguments))
    assert code == 2 and says in said and len(checkpoint_folders(run_folder / "checkpoints")) == 4


def test_a_store_that_does_not_answer_is_one_clear_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:  # nobody listens on it
        taken.bind(("127.0.0.1", 0))
        where = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with object_stores.environment(**object_stores.S3_ENV, AWS_ENDPOINT_URL=where):
            object_stores.forget()
            for words in (["checkpoints", "s3://bucket/run"], ["export", "s3://bucket/run/step-000001", "/nonexistent/out"]):
                code, said = everstep(capsys, *words)
                assert code == 3 and "check the address, the network and the credentials" in said and "Traceback" not in said
    object_stores.forget()


# ---------------------------------------------------------------- everstep export


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["RUN/nowhere", "OUT"], "RUN/nowhere: no such folder"),
        (["RUN", "OUT"], "not a checkpoint (no manifest.json); did you mean RUN/checkpoints/step-000004?"),
        (["RUN/checkpoints/step-000002", "OUT"], "is not usable: RUN/checkpoints/step-000002/state"),
        (["RUN/checkpoints/step-000004", "RUN/configs"], "holds something already; name a new or empty folder"),
        (["RUN/checkpoints/step-000004", "RUN/configs/resolved.yaml"], "holds something already; name a new or empty folder"),
    ],
)
def test_what_export_refuses(run_folder: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    flip_a_bit(shard(run_folder / "checkpoints" / "step-000002"), -1)
    place = lambda word: word.replace("RUN", str(run_folder)).replace("OUT", str(run_folder / "out"))
    code, said = everstep(capsys, "export", *map(place, arguments))
    assert code == 2 and place(says) in said and not (run_folder / "out").exists()


SUMS = ROOT / "examples" / "models" / "tiny-qwen3-sums"
TRAINED = [f"model.path={SUMS}", "model.init=pretrained", "data.source=everstep.data.arithmetic:product_chats", "data.format=chat", "data.max_tokens=64",
           "data.eval_source=${data.source}", "sft.eval_samples=16", "sft.eval_every=4", "sft.steps=4", "sft.samples_per_step=16",
           "train.micro_batch_size=4", "optimizer.decay_steps=4", "optimizer.warmup_steps=0", "optimizer.lr=0.01", "checkpoint.hf=false"]
LORA = ["lora.rank=4", "lora.alpha=8"]
PIPELINE = ["layout.replicas=1", "layout.pp=2"]
TENSOR = ["layout.replicas=2", "layout.tp=2", "engine.sequence_parallel=true"]
ALONE = ["layout.replicas=1"]


def loss_of(model: torch.nn.Module, held_out: Any) -> float:
    """The mean over tokens of their negative log-probability, by transformers."""
    with torch.no_grad():
        logits = model.eval()(held_out["input_ids"], attention_mask=held_out["attention_mask"]).logits[:, :-1].float()
    nll = torch.nn.functional.cross_entropy(logits.transpose(1, 2), held_out["input_ids"][:, 1:], reduction="none")
    mask = held_out["loss_mask"][:, 1:]
    return float((nll * mask).sum() / mask.sum())


@contextlib.contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """The kernel refuses this process to write more into a file, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("layout", "lora", "store"),
    [
        (TENSOR, True, False),
        (PIPELINE, False, True),
        *(pytest.param(layout, lora, store, marks=pytest.mark.full)
          for layout in (ALONE, PIPELINE, TENSOR) for lora in (False, True) for store in (False, True)),
    ],
    ids=lambda value: "-".join(w.partition(".")[2] for w in value) if isinstance(value, list) else str(value),
)  # fmt: skip
def test_export_makes_the_model_that_was_trained(
    layout: list[str], lora: bool, store: bool, tmp_path: Path, s3: str, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """The oracle is transformers: the loss on held-out samples is what the run said of its last step; and merged or not, peft's
    adapters are the same model."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    env = object_stores.S3_ENV | {"AWS_ENDPOINT_URL": s3}
    where = f"s3://{BUCKET}/{tmp_path.name}" if store else str(tmp_path / "run" / "checkpoints")
    more = [*(LORA if lora else []), *([f"checkpoint.path={where}", *(f"env.{k}={v}" for k, v in env.items())] if store else [])]
    conf = config(SFT, tmp_path / "run", *TRAINED, *layout, *more)
    run = finish(conf, host=ForkedHost)
    said = [row["val/loss"] for row in read_metrics(run.folder / "metrics.jsonl") if "val/loss" in row][-1]
    held_out = check(conf).eval.first(16)

    def exported(*arguments: str) -> Path:
        out = tmp_path / f"out{len(arguments)}"
        words = ["export", f"{where}/step-000004", str(out), *arguments]
        if request.node.get_closest_marker("full"):  # a process of its own, which sees no GPU
            process = command(words, CUDA_VISIBLE_DEVICES="", **(env if store else {}))
            printed, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
        else:
            code, printed = everstep(capsys, *words)
            assert code == 0, printed
        told = printed.partition(f"{out}: ")[2]
        assert all(path.name in told for path in out.iterdir()), "every file is told"
        return out

    if not store:  # nobody vouches for it: it is in no manifest
        (Path(where) / "step-000004" / "model" / "stray").symlink_to("/etc/hostname")
    with files_of_at_most(1 << 14):
        code, printed = everstep(capsys, "export", f"{where}/step-000004", str(tmp_path / "part"))
    assert code == 3 and "File too large" in printed and not list(tmp_path.glob("*part*")), "nothing of it is left"
    before = AutoModelForCausalLM.from_pretrained(SUMS, dtype=torch.float32)
    whole = AutoModelForCausalLM.from_pretrained(exported(), dtype=torch.float32)
    assert not (tmp_path / "out0" / "stray").exists()
    assert loss_of(whole, held_out) == pytest.approx(said, rel=1e-4)
    assert abs(loss_of(before, held_out) - said) > 0.05 * said, "training changed it"
    if lora:
        adapted = PeftModel.from_pretrained(before, exported("--adapter"))
        assert loss_of(adapted, held_out) == pytest.approx(said, rel=1e-4)
        ids = held_out["input_ids"][:4]
        with torch.no_grad():
            assert (adapted.eval()(ids).logits - whole(ids).logits).abs().max() < 1e-4
    else:
        code, printed = everstep(capsys, "export", f"{where}/step-000004", str(tmp_path / "x"), "--adapter")
        assert code == 2 and "has no adapters (lora.rank is 0)" in printed
    code, printed = everstep(capsys, "export", f"{where}/step-000004", str(tmp_path / "x"), "--critic")
    assert code == 2 and "has no critic (recipe=sft)" in printed and not (tmp_path / "x").exists()
    code, printed = everstep(capsys, "checkpoints", where if store else str(run.folder), "--verify")
    assert code == 0 and "step-000004 (latest)" in printed
