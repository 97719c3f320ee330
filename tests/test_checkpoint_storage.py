"""Checkpoints in buckets: real protocol servers, and what they do to clients on bad days."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.runs import SFT, config, finish
from tests.test_faults import assert_invariants

from everstep.checkpoint import listing
from everstep.checkpoint.choose import Chosen, adopt, choose
from everstep.checkpoint.index import Index
from everstep.checkpoint.manifest import checkpoint_folders, damage, existing, incomplete, pointed_at, retire, sweep
from everstep.checkpoint.sharded import whole_tensor
from everstep.checkpoint.storage import CheckpointError, patiently, place, read_file, storage_errors, write_file
from everstep.cluster import forked
from everstep.cluster.forked import ForkedHost
from everstep.errors import BadInput
from everstep.telemetry.events import EventLog
from support import object_stores
from support.object_stores import BUCKET, Trouble, troubled
from test_checkpoint import save, shard


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with object_stores.s3() as address:
        yield address


@pytest.fixture(params=["s3", "gs"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A new place in a bucket."""
    if request.param == "s3":
        request.getfixturevalue("s3")
        yield place(f"s3://{BUCKET}/{tmp_path.name}")
    else:
        with object_stores.gcs():
            yield place(f"gs://{BUCKET}/{tmp_path.name}")


def test_the_life_of_checkpoints_in_a_bucket(bucket: Path) -> None:
    assert choose(bucket, "auto").path is None and pointed_at(bucket) is None
    for step in (1, 2, 3):
        save(bucket, step, keep_last=2)
    assert [f.name for f in checkpoint_folders(bucket)] == ["step-000003", "step-000002"]
    assert str(pointed_at(bucket)) == str(bucket / "step-000003")
    chosen = choose(bucket, "must")
    assert chosen.step == 3 and str(chosen.path) == f"{bucket}/step-000003"
    assert choose(bucket, str(bucket / "step-000002")).step == 2

    victim = shard(bucket / "step-000003", 1)
    content = bytearray(read_file(victim))
    content[-1] ^= 1
    write_file(victim, bytes(content))
    assert incomplete(bucket / "step-000003") is None
    assert "damaged in model/param/b[8:16,0:1]" in (damage(bucket / "step-000003") or "")
    assert retire(bucket, keep_last=1) == [], "the only good one stays"
    (worst, good) = listing.rows(bucket, verify=True)
    assert worst.trouble and worst.pointers == ("latest",) and good.trouble is None
    chosen = choose(bucket, "auto")
    assert (chosen.step, [path.name for path, _ in chosen.skipped]) == (2, ["step-000003"])
    adopt(bucket, chosen)
    assert choose(bucket, "auto").skipped == [] and str(pointed_at(bucket)) == f"{bucket}/step-000002"
    assert damage(bucket / "set-aside" / "step-000003"), "put aside, not deleted"

    write_file(bucket / "step-000007/state/left-over.safetensors", b"of a save that died")
    write_file(bucket / "step-000002/state/stray.safetensors", b"of an attempt that failed")
    assert choose(bucket, "auto").step == 2, "what has no manifest is no checkpoint"
    assert listing.prune(str(bucket), bucket, 2, 0) == [], "it may be a save that is on its way"
    assert len(sweep(bucket)) == 2 and choose(bucket, "must").step == 2
    assert [f.name for f in checkpoint_folders(bucket)] == ["step-000002"]

    write_file(bucket / "step-000001/manifest.json", b"{}")
    adopt(bucket, choose(bucket, "auto"))
    assert sweep(bucket) == [] and len(checkpoint_folders(bucket)) == 2, "a damaged one is in nobody's way"


def judged(bucket: Path, refused: Callable[[str, str], bool]) -> list[str]:
    """What is made of three checkpoints while the store does not answer such requests (method, path). Each must say that it could not
    look; returns what lies there afterwards."""
    with object_stores.environment(AWS_MAX_ATTEMPTS="1"), troubled(os.environ["AWS_ENDPOINT_URL"], lambda m, p, h: 403 if refused(m, p) else None):
        at = place(str(bucket))
        for look in (lambda: choose(at, "auto"), lambda: choose(at, "3"), lambda: adopt(at, Chosen("auto")), lambda: sweep(at)):
            with pytest.raises(CheckpointError, match=r"s3://.* failed: (Forbidden|AccessDenied); check the address, the network and the credentials"):
                look()
        with contextlib.suppress(CheckpointError):  # it needs no list
            assert str(existing(at, 3)) == str(at / "step-000003")
    return sorted(path.name for path in place(str(bucket)).iterdir())


@pytest.mark.parametrize(
    "refused",
    [
        lambda method, path: method == "HEAD" and path.endswith("manifest.json"),
        pytest.param(lambda method, path: method == "GET" and path.endswith("step-000003/manifest.json"), marks=pytest.mark.full),
        pytest.param(lambda method, path: "list-type" in path, marks=pytest.mark.full),
    ],
    ids=["what-is-there", "what-it-says", "what-there-is"],
)
def test_a_store_that_does_not_answer_costs_no_checkpoint(s3: str, tmp_path: Path, refused: Callable[[str, str], bool]) -> None:
    """None is passed over, put aside, written over or swept up because nobody said that it is whole."""
    bucket = place(f"s3://{BUCKET}/{tmp_path.name}")
    for step in (1, 2, 3):
        save(bucket, step)
    assert judged(bucket, refused) == ["latest", "step-000001", "step-000002", "step-000003"]
    assert [damage(folder) for folder in checkpoint_folders(bucket)] == [None] * 3


def at_most(times: int, action: int | float | str, method: str = "PUT") -> Trouble:
    """The first ``times`` requests by ``method`` go wrong."""
    left = [times]

    def trouble(sent: str, path: str, headers: Any) -> int | float | str | None:
        if sent != method or left[0] == 0:
            return None
        left[0] -= 1
        return action

    return trouble


def put(address: Path, content: bytes, for_s: float) -> None:
    def act(path: Path) -> None:
        with storage_errors("writing", path):
            write_file(path, content)

    patiently(act, address, for_s)


@pytest.mark.parametrize(
    "trouble",
    [at_most(8, 503), at_most(4, "drop"), at_most(1, 0.5), at_most(1, "cut", "GET")],
    ids=["503s", "vanished", "slow", "cut-short"],
)
def test_bad_days_pass(s3: str, trouble: Trouble, tmp_path: Path) -> None:
    with troubled(s3, trouble) as proxy:
        address = place(f"s3://{BUCKET}/{tmp_path.name}/x")
        put(address, b"content" * 100, 30.0)
        back: Callable[[Path], bytes] = lambda path: _reading(path)
        assert patiently(back, address, 30.0) == b"content" * 100
        assert len(proxy.seen) > 2


def _reading(path: Path) -> bytes:
    with storage_errors("reading", path):
        return read_file(path)


def test_credentials_that_expire_are_looked_up_again(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with roles and tokens that something else on the machine renews in the credentials file."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    credentials = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    write = lambda key: credentials.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret\n")
    write("FIRST")
    valid = {"FIRST"}

    def trouble(method: str, path: str, headers: Any) -> int | None:
        return None if any(key in headers["Authorization"] for key in valid) else 400

    with troubled(s3, trouble):
        address = place(f"s3://{BUCKET}/{tmp_path.name}/x")
        put(address, b"one", 0.0)
        valid.clear()
        valid.add("SECOND")
        with pytest.raises(CheckpointError, match=r"writing s3://.*/x failed"):
            put(address, b"two", 0.0)
        write("SECOND")
        put(address, b"three", 20.0)
        assert read_file(place(str(address))) == b"three"


def test_a_store_that_stays_away_is_a_typed_error_in_time(tmp_path: Path, s3: str) -> None:
    with troubled(s3, lambda method, path, headers: "drop"):
        start = time.monotonic()
        with pytest.raises(CheckpointError, match=r"writing s3://bucket/.* failed: .*; check the address, the network and the credentials"):
            put(place(f"s3://{BUCKET}/{tmp_path.name}/x"), b"x", 0.0)
        assert time.monotonic() - start < 30


def test_an_address_that_cannot_be_used_is_bad_input() -> None:
    with pytest.raises(BadInput, match="nonsense://x: not an address"):
        place("nonsense://x")


@pytest.mark.full
def test_large_files_go_in_parts(s3: str, tmp_path: Path) -> None:
    content = os.urandom(1 << 20) * 110
    with troubled(s3, lambda method, path, headers: None) as proxy:
        address = place(f"s3://{BUCKET}/{tmp_path.name}/large")
        write_file(address, content)
        assert sum("partNumber" in path for _, path in proxy.seen) >= 2
        assert read_file(address, 109 << 20) == content[109 << 20 :]


def save_second(where: str, env: dict[str, str]) -> None:
    os.environ.update(env)
    save(place(where), 2, keep_last=1)


@pytest.mark.full
@pytest.mark.timeout(600)  # a process each time, which imports the storage libraries anew
def test_sigkill_at_every_request_leaves_a_complete_checkpoint(s3: str, tmp_path: Path) -> None:
    """A real process saves step 2 into a bucket, and is killed when its n-th request arrives, for every n."""
    n, killed = 0, 0
    while True:
        n += 1
        where = f"s3://{BUCKET}/{tmp_path.name}-{n}"
        save(place(where), 1)
        pid: list[int] = []
        count = [0]

        def trouble(method: str, path: str, headers: Any, stage: int = n, count: list[int] = count, pid: list[int] = pid) -> None:
            count[0] += 1
            if count[0] == stage and pid:
                os.kill(pid[0], signal.SIGKILL)
                time.sleep(0.05)  # what it asked for still happens

        with troubled(s3, trouble) as proxy:
            # Not forked from here: the threads of the storage libraries do not survive a fork.
            process = forked.context().Process(target=save_second, args=(where, object_stores.S3_ENV | {"AWS_ENDPOINT_URL": proxy.address}))
            process.start()
            pid.append(process.pid)
            process.join(60)
            code = process.exitcode
        root = place(where)
        pointed = pointed_at(root)
        assert pointed is not None and damage(pointed) is None, f"request {n}: pointer at {pointed}"
        chosen = choose(root, "must")
        assert chosen.step >= (2 if code == 0 else 1)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        killed += 1
        adopt(root, chosen)
        save(root, 3, keep_last=1)
        sweep(root)
        assert [f.name for f in checkpoint_folders(root)] == ["step-000003"]
    assert killed >= 15


def test_training_does_not_wait_for_a_store_that_hangs(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the commit of step 3 on no request is answered until step 12 is committed, and then the first six with 503. Nothing is lost."""
    hangs, answers, refused = threading.Event(), threading.Event(), [6]
    emit = EventLog.emit

    def watched(self: EventLog, event: str, *, step: int | None = None, **fields: Any) -> None:
        emit(self, event, step=step, **fields)
        if event == "commit" and step in (3, 12):
            (hangs if step == 3 else answers).set()

    def trouble(method: str, path: str, headers: Any) -> int | None:
        if hangs.is_set() and not answers.wait(60.0):
            return 503
        if hangs.is_set() and refused[0]:
            refused[0] -= 1
            return 503
        return None

    with troubled(s3, trouble) as proxy, monkeypatch.context() as patched:
        patched.setattr(EventLog, "emit", watched)
        env = object_stores.S3_ENV | {"AWS_ENDPOINT_URL": proxy.address}
        run = finish(config(SFT, tmp_path / "run", "layout.replicas=2", "sft.steps=12", "checkpoint.every_steps=2", *(f"env.{k}={v}" for k, v in env.items()),
                            f"checkpoint.path=s3://{BUCKET}/{tmp_path.name}", "checkpoint.hf=false"), host=ForkedHost)
    committed = {e.step: e.t_mono for e in run.kind("commit")}
    (stuck,) = [e for e in run.kind("save") if committed[3] < e.t_mono and e.step < 12]
    assert stuck.t_mono > committed[12] > committed[stuck.step], "steps were made while a save hung"
    assert run.kind("save")[-1].step == 12 and damage(place(f"s3://{BUCKET}/{tmp_path.name}/step-000012")) is None
    assert_invariants(run, steps=12)


def test_a_run_into_a_bucket_is_resumed_from_it(s3: str, tmp_path: Path) -> None:
    where = f"s3://{BUCKET}/{tmp_path.name}"
    env = object_stores.S3_ENV | {"AWS_ENDPOINT_URL": s3}  # for the workers; ours has it
    short = ["layout.replicas=2", "recovery.exact=true", "optimizer.decay_steps=6", *(f"env.{k}={v}" for k, v in env.items())]
    whole = finish(config(SFT, tmp_path / "whole", *short, "sft.steps=6", "checkpoint.at_end=false"), host=ForkedHost)
    first = finish(config(SFT, tmp_path / "run", *short, "sft.steps=4", "checkpoint.every_steps=2", f"checkpoint.path={where}"), host=ForkedHost)
    assert [e["path"] for e in first.kind("save")] == [f"{where}/step-000002", f"{where}/step-000004"]
    assert not (tmp_path / "run" / "checkpoints").exists()
    with pytest.raises(BadInput, match=r"checkpoint\.path=s3://.* has checkpoints of a run \(step-000004\)"):
        finish(config(SFT, tmp_path / "other", *short, f"checkpoint.path={where}"), host=ForkedHost)
    shutil.rmtree(tmp_path / "run")  # another machine
    again = finish(config(SFT, tmp_path / "run", *short, "sft.steps=6", f"checkpoint.path={where}", "resume=must"), host=ForkedHost)
    assert again.kind("load")[0].step == 4 and again.final_hashes == whole.final_hashes
    index = Index(place(f"{where}/step-000006"))
    assert whole_tensor(index, "model/param/model.norm.weight").shape == (64,)
