"""What others could do to a run: where its processes listen, what they make of bytes from the network, and which paths they write."""

from __future__ import annotations

import ast
import multiprocessing as mp
import os
import pickle
import socket
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from tests.support.runs import SFT, config, finish

from everstep.cluster.batch import TrainingBatch
from everstep.cluster.forked import ForkedHost
from everstep.cluster.worker.exchange import broadcast_object, from_batch, gather_batches, gather_objects, to_batch
from everstep.errors import ReplicaBroken

ROOT = Path(__file__).parent.parent

#: Where Python objects are made of bytes, and whose bytes those are. A new line here needs a reason, and one in docs/security.md.
UNPICKLES = {
    "cluster/worker/exchange.py": "with a keyed digest, checked before",
    "cluster/forked.py": "pipes and sockets of one machine, which multiprocessing authenticates",
    "cluster/local/group.py": "what the lighthouse hands on, over connections that showed the secret",
}


class Bomb:
    """Its unpickling writes a file."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


def _rank(rank: int, port: int, folder: str, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mine = TrainingBatch({"a": torch.full((rank + 1, 2), rank + 0.5, dtype=torch.bfloat16)}, {"t": [f"é{rank}"] * (rank + 1)}, [str(i) for i in range(rank + 1)])
    said = [from_batch(b) if b else None for b in gather_batches(mine if rank else None)]
    objects = [gather_objects({"rank": rank}, "secret"), broadcast_object(("from", rank), "secret")]
    try:
        gather_objects(Bomb(f"{folder}/{rank}") if rank == 1 else None, f"secret{rank}")
        outcome = "opened"
    except ReplicaBroken as error:
        outcome = str(error)
    if rank == 0:
        try:
            gather_objects({"rank": rank}, "secret")  # the other one is gone
        except ReplicaBroken as error:
            outcome += f"; {error}"
    results.put((rank, said, objects, outcome))
    dist.destroy_process_group()


def test_ranks_open_only_what_carries_their_secret(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = mp.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, port, str(tmp_path), results)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    said = sorted((results.get(timeout=60) for _ in ranks), key=lambda row: row[0])
    for process in ranks:
        process.join(30)
    for rank, batches, objects, outcome in said:
        assert batches[0] is None
        batch = to_batch(batches[1])
        assert batch["a"].dtype == torch.bfloat16 and batch["a"].shape == (2, 2) and batch.columns == {"t": ["é1", "é1"]} and batch.sample_ids == ["0", "1"]
        assert objects == [[{"rank": 0}, {"rank": 1}], ("from", 0)]
        assert "does not carry the replica's secret" in outcome, (rank, outcome)
        assert ("a rank of this replica is gone" in outcome) == (rank == 0)
    assert list(tmp_path.iterdir()) == []  # the bomb was not unpickled


@pytest.mark.parametrize("data", [b"", b"x" * 7, pickle.dumps(1), b"\x05\0\0\0\0\0\0\0{}   ", b"\xff" * 64])
def test_what_is_no_batch_is_refused(data: bytes) -> None:
    with pytest.raises(ReplicaBroken, match="no batch"):
        to_batch(data)


def test_nothing_else_unpickles() -> None:
    """Every place in the sources that makes objects of bytes is in the table above; torch.load and object collectives are nowhere."""
    found: set[str] = set()
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            assert not name.endswith(("broadcast_object_list", "gather_object", "scatter_object_list", "torch.load", "yaml.load", "cloudpickle.loads")), (path, name)
            assert name not in ("eval", "exec", "os.system"), (path, name)
            if name in ("pickle.loads", "pickle.load"):
                found.add(str(path.relative_to(ROOT / "src" / "everstep")))
    assert found == set(UNPICKLES)


def test_a_run_listens_on_this_machine_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all processes of a run with a death in it: every TCP port that is open is bound to the loopback interface."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # gloo's own are where this says (docs/security.md)
    me, seen, over = psutil.Process(), set[tuple[str, int]](), threading.Event()
    mine = {c.laddr for c in me.net_connections("inet") if c.status == psutil.CONN_LISTEN}

    def look() -> None:
        while not over.wait(0.3):
            for process in [me, *me.children(recursive=True)]:
                try:
                    seen.update(tuple(c.laddr) for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN and c.laddr not in mine)
                except psutil.Error:
                    continue

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        fault = "{step: 3, phase: reduce, replica: 1}"
        finish(config(SFT, tmp_path / "run", "layout.replicas=3", "layout.spares=1", "sft.steps=8", "optimizer.warmup_steps=0", f"faults=[{fault}]", "env.GLOO_SOCKET_IFNAME=lo"),
               host=ForkedHost)
    finally:
        over.set()
        watcher.join()
    assert len(seen) >= 4  # coordinator, store, orders, gloo
    assert {host for host, _ in seen} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, seen


def test_files_with_secrets_are_for_their_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: dict[str, int] = {}
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.01):
            for name in ("control.json", "controller.json"):
                try:
                    modes[name] = os.stat(tmp_path / "run" / name).st_mode & 0o777
                except OSError:
                    continue

    watcher = threading.Thread(target=look)
    watcher.start()
    os_umask = os.umask(0)
    try:
        finish(config(SFT, tmp_path / "run", "layout.replicas=1", "layout.spares=0", "faults=[]", "sft.steps=6", "optimizer.warmup_steps=0", "recovery.controller_grace_s=5"), host=ForkedHost)
    finally:
        os.umask(os_umask)
        over.set()
        watcher.join()
    assert modes == {"control.json": 0o600, "controller.json": 0o600}


OUT = ["../secret", "/etc/passwd", "a/../../b", "s3://bucket/x", "a\\..\\b", ""]


@pytest.mark.parametrize("name", OUT)
def test_files_of_a_checkpoint_or_model_cannot_lead_out_of_it(tmp_path: Path, name: str) -> None:
    """A manifest, an index, a pointer, a list of shards that somebody else made: refused in one sentence, nothing is read or deleted."""
    import json

    from everstep.checkpoint.index import INDEX, Index
    from everstep.checkpoint.manifest import FORMAT, MANIFEST, POINTER, incomplete, pointed_at, read_manifest
    from everstep.config.schema import ModelConfig
    from everstep.engine.source import _safetensors_files, resolve
    from everstep.errors import BadInput

    folder = tmp_path / "step-000001"
    (folder / "state").mkdir(parents=True)
    entry = {"bytes": 1, "xxh3_128": "0" * 32}
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, "everstep": "0", "step": 1, "layout": {}, "created": 0.0, "files": {name: entry}}))
    with pytest.raises(BadInput, match="out of its folder"):
        read_manifest(folder)
    assert "out of its folder" in (incomplete(folder) or "")
    (folder / INDEX).write_text(json.dumps({"scalars": {}, "tensors": {"t": {"dtype": "F32", "shape": [1], "boxes": [[name, 0, 0, 1, 1, 0, 4, "0"]]}}}))
    with pytest.raises(BadInput, match="out of its folder"):
        Index(folder)
    if name:
        (tmp_path / POINTER).write_text(name + "\n")
        with pytest.raises(BadInput, match="which is no checkpoint"):
            pointed_at(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text((ROOT / "examples/models/tiny-qwen3/config.json").read_text())
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(BadInput, match=r"out of its folder|\.safetensors|lacks"):
        _safetensors_files(resolve(ModelConfig(path=str(model))))
