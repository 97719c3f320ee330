"""How many ranks the coordinator bears: the real one, its commit record forced to disk, and fake ranks that only talk.

    python -m benchmarks.control_plane [--ranks 1000] [--per-replica 8] [--steps 30] [--kills 3] [--out FILE.json]

The ranks are sockets in a few processes of this machine. In each step they say what ranks say (five phases, a vote), and wait for
the commit; then connections are closed, as a kill closes them. Measured, all on one monotonic clock:

    commit      from the last vote that is sent until all ranks have the commit (and until the first has it)
    processor   of the coordinator's process, for one step
    view        from the death of a connection until all survivors have the view without it

What the ranks' own processes take on the same cores is in these times: on a cluster it is not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing as mp
import os
import secrets
import selectors
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.circumstances import circumstances
from everstep.recovery import wire
from everstep.recovery.commitlog import CommitLog
from everstep.recovery.coordinator import Coordinator
from everstep.recovery.desk import Listener
from everstep.recovery.server import CoordinatorServer
from everstep.recovery.view import Kind, Member, Record
from everstep.telemetry.events import EventLog

PHASES = ("begin", "compute", "exchange", "reduce", "vote")
_DEADLINE_S = 120.0


class Talkers:
    """Some of the fake ranks, in a process of their own."""

    def __init__(self, pipe: Connection, address: tuple[str, int], token: str, workers: Sequence[tuple[str, int]]):
        self._pipe, self._poll = pipe, selectors.DefaultSelector()
        self._sockets: dict[str, socket.socket] = {}
        self._position = dict(workers)
        self._incoming: dict[str, wire.Reader] = {}
        self._last: dict[str, dict[str, Any]] = {}  # the newest record of each rank
        self._bases: dict[str, dict[str, Any]] = {}  # the view of its newest record that others are told by
        for worker, _ in workers:
            sock = socket.create_connection(address, timeout=60)
            wire.tune(sock)
            wire.send(sock, {"token": token, "worker": worker, "pid": os.getpid(), "host": "fake"})
            self._sockets[worker], self._incoming[worker] = sock, wire.Reader(sock)
            self._poll.register(sock, selectors.EVENT_READ, worker)
        pipe.send("connected")
        while (order := pipe.recv()) is not None:
            pipe.send(getattr(self, order[0])(*order[1:]))

    def step(self, step: int, slots: int) -> tuple[float, float, float]:
        """When the last vote was sent, and the first and the last rank had the commit."""
        view = self._await(lambda record: record["view"]["committed"] >= step - 1)
        epoch = view["view"]["epoch"]
        for worker, sock in self._sockets.items():
            for phase in PHASES:
                wire.send(sock, {"type": "progress", "step": step, "phase": phase, "detail": {}})
            vote = {"worker": worker, "step": step, "epoch": epoch, "digest": self._position[worker], "divisor": float(slots), "spoiled": [], "reruns": [],
                    "grad_norm_bits": 1, "finite": True, "healed": True, "slots": list(range(slots))}
            wire.send(sock, {"type": "vote", "vote": vote})
        sent = time.monotonic()
        times: list[float] = []
        self._await(lambda record: record["view"]["committed"] >= step, times)
        return sent, min(times), max(times)

    def close(self, workers: Sequence[str]) -> float:
        """These die. When."""
        now = time.monotonic()
        for worker in workers:
            if worker in self._sockets:
                self._poll.unregister(self._sockets[worker])
                self._sockets.pop(worker).close()
        return now

    def view_without(self, replica: int) -> float:
        """When the last rank had a view without this replica."""
        times: list[float] = []
        self._await(lambda record: all(m["replica"] != replica for m in record["view"]["members"]), times)
        return max(times, default=time.monotonic())

    def _await(self, wanted: Any, times: list[float] | None = None) -> dict[str, Any]:
        waiting = {worker for worker in self._sockets if worker not in self._last or not wanted(self._last[worker])}
        end = time.monotonic() + _DEADLINE_S
        while waiting:
            if time.monotonic() > end:
                raise TimeoutError(f"{len(waiting)} ranks wait")
            for key, _ in self._poll.select(1.0):
                worker, incoming = key.data, self._incoming[key.data]
                try:
                    incoming.read()
                except wire.Closed as closed:
                    raise ConnectionError(f"the coordinator closed {worker}") from closed
                while (message := incoming.whole()) is not None:
                    if message["type"] == "record":
                        record = message["record"]
                        if record["base"] is not None:  # told by how it differs from the last view or commit
                            view = record["view"] = (base := self._bases[worker]) | record["view"]
                            if isinstance(new := view["members"], dict):
                                view["members"] = [m for m in base["members"] if m["replica"] not in new["without"]] + new["with"]
                        if record["kind"] != Kind.BUILD:
                            self._bases[worker] = record["view"]
                        self._last[worker] = record
                        if worker in waiting and wanted(record):
                            waiting.discard(worker)
                            if times is not None:
                                times.append(time.monotonic())
        return next(iter(self._last.values()))


def measure(ranks: int, per_replica: int, steps: int, kills: int, processes: int, folder: Path) -> dict[str, Any]:
    """One coordinator, ``ranks`` fake ranks. Seconds, and bytes of a commit record as a rank gets it."""
    replicas = ranks // per_replica
    names = [[f"w{replica * per_replica + rank}" for rank in range(per_replica)] for replica in range(replicas)]
    place = {name: (replica, rank) for replica, row in enumerate(names) for rank, name in enumerate(row)}
    committed, newest = threading.Condition(), [0]
    sizes: list[int] = []
    before: list[Record | None] = [None]

    def on_record(record: Record) -> None:
        with committed:
            if record.kind is Kind.COMMIT:
                newest[0] = record.step
                sizes.append(len(json.dumps(record.to_json(before[0]), separators=(",", ":"))))
            if record.kind is not Kind.BUILD:
                before[0] = record
            committed.notify_all()

    log = CommitLog(folder / "commits.log")
    events = EventLog(folder / "lead.jsonl", "lead")
    token = secrets.token_hex(16)
    server = CoordinatorServer(
        Coordinator(log.incarnation, 0, 1, standbys_up_to=0), log, events, Listener(lambda worker: place[worker], on_record=on_record), token,
        silence_s=_DEADLINE_S, build_timeout_s=_DEADLINE_S, heartbeat_s=1.0,
    )
    context = mp.get_context("spawn")
    talkers: list[tuple[Any, Connection]] = []
    flat = [(name, rank) for row in names for rank, name in enumerate(row)]
    try:
        for index in range(processes):
            mine, theirs = context.Pipe()
            process = context.Process(target=Talkers, args=(theirs, server.address, token, flat[index::processes]), daemon=True)
            process.start()
            talkers.append((process, mine))
        for _, pipe in talkers:
            _take(pipe)
        end = time.monotonic() + _DEADLINE_S
        while len(server.progress) < len(flat):
            if time.monotonic() > end:
                raise TimeoutError(f"{len(server.progress)} of {len(flat)} ranks came")
            time.sleep(0.01)
        server.open([Member(replica, 0, tuple(row)) for replica, row in enumerate(names)])
        samples = tuple((f"s{slot}",) for slot in range(replicas))
        first, last, processor = [], [], []
        for step in range(1, steps + 1):
            begun = time.process_time()
            server.begin(step, samples)
            told = _all(talkers, ("step", step, replicas))
            processor.append(time.process_time() - begun)
            sent = max(t[0] for t in told)
            first.append(min(t[1] for t in told) - sent)
            last.append(max(t[2] for t in told) - sent)
        views = []
        for kill in range(min(kills, replicas - 1)):
            died = max(_all(talkers, ("close", names[kill][:1])))
            views.append(max(_all(talkers, ("view_without", kill))) - died)
        return {
            "ranks": len(flat), "replicas": replicas, "steps": steps, "record_bytes": statistics.median(sizes),
            "commit_all_s": _spread(last), "commit_first_s": _spread(first), "processor_s": _spread(processor), "view_s": _spread(views),
        }
    except TimeoutError as error:
        state = f"{server.coordinator.committed} steps are committed, {len(server.coordinator.votes)} votes are there, expelled: {dict(list(server.dead.items())[:3])}"
        raise TimeoutError(f"{error}; {state}; {server.failure}") from error
    finally:
        for process, pipe in talkers:
            with contextlib.suppress(OSError):  # it has failed, and said why
                pipe.send(None)
            process.join(5)
            process.kill()
        server.close()
        events.close()


def _take(pipe: Connection) -> Any:
    if not pipe.poll(_DEADLINE_S):
        raise TimeoutError("a process of fake ranks does not answer")
    return pipe.recv()


def _all(talkers: Sequence[tuple[Any, Connection]], order: tuple[Any, ...]) -> list[Any]:
    for _, pipe in talkers:
        pipe.send(order)
    return [_take(pipe) for _, pipe in talkers]


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    return {"median": statistics.median(seconds), "greatest": max(seconds)} if seconds else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1000])
    parser.add_argument("--per-replica", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2, help="that the fake ranks are in")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    logging.disable(logging.WARNING)  # every connection ends at the end
    rows = []
    print("ranks  replicas  record   commit: all ranks (median, greatest)  first rank  processor  view after a death")
    for ranks in given.ranks:
        with tempfile.TemporaryDirectory() as folder:
            row = measure(ranks, min(given.per_replica, ranks), given.steps, given.kills, given.processes, Path(folder))
        rows.append(row)
        view = row["view_s"]["median"] if row["view_s"] else float("nan")
        print(f"{row['ranks']:5d}  {row['replicas']:8d}  {row['record_bytes'] / 1024:5.1f}K  {row['commit_all_s']['median'] * 1e3:8.1f} ms {row['commit_all_s']['greatest'] * 1e3:8.1f} ms"
              f"               {row['commit_first_s']['median'] * 1e3:8.1f} ms  {row['processor_s']['median'] * 1e3:6.1f} ms  {view * 1e3:8.1f} ms", flush=True)
    if given.out:
        given.out.write_text(json.dumps({"about": circumstances("control_plane"), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
