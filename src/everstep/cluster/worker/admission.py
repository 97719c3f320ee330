"""Before a process that was started while a run goes on is counted as a spare, its device shows that it is fit: a short form of
:mod:`everstep.doctor`, run by that process itself.

Products with a known result, a pattern written, copied and read back, and a sum with an idle spare, over a link like those of the run. Nobody
but the start of that process waits for it. One that fails is ended, never given a place, and told as a ``refused`` event.

Without Ray there are no spares: the ranks of a replica that is started anew examine their devices and sum with each other, before their replica
joins (:func:`admit_replica`). If one fails none of them joins, and torchrun does not start them again: it has no other device.
"""

from __future__ import annotations

import itertools
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from everstep.cluster.host import Host, ProcessEnded
from everstep.cluster.worker.exchange import gather_objects
from everstep.config.watch_schema import WatchConfig
from everstep.doctor import Found, Unfit, guarded, matmul, memory
from everstep.errors import DeadlineExceeded, EverstepError, LinkBroken, ReplicaBroken, first_line
from everstep.recovery.link import Link

LOG = logging.getLogger(__name__)
NBYTES = {"cuda": 256 << 20, "cpu": 16 << 20}  # of the pattern: other processes may be using the device
_NUMEL = 1 << 20  # of the sum with a neighbour
SUM_S = 3.0      # deadline of that: an idle spare is kept busy no longer
_START_S = 60.0   # libraries load within the first product


def examine(
    device: torch.device, seconds: float, neighbour: tuple[str, int] | None, connect: Callable[[str, int], Link], alone: bool,
) -> list[dict[str, Any]]:
    """In the process concerned. ``seconds``: for each measurement. ``neighbour``: (name of the link, which of its two ends this is).
    ``alone``: whether this device is the one in question, or only helps the other. Returns what was found, as JSON."""
    found: list[Found] = []
    if alone:
        for check in (lambda: matmul(device, seconds), lambda: memory(device, seconds, NBYTES[device.type])):
            found.append(guarded("device", str(device), check))
    if neighbour:
        found.append(guarded("device", str(device), lambda: _sum(device, connect(*neighbour), neighbour[1])))
    return [_plain(f) for f in found]


def admit_replica(config: WatchConfig, device: torch.device, worker: str, anew: bool, note: Callable[..., None], secret: str) -> None:
    """launcher=local: called by every rank of a replica, in torch's world of it. Raises Unfit, the same on all of them, if a device failed;
    ReplicaBroken if one of them is gone. ``anew``: the run goes on already. ``note(event, **fields)``: emits an event."""
    if config.admission == "never" or (config.admission == "restarts" and not anew):
        return
    begun = time.monotonic()
    found = examine(device, config.admission_s, None, _no_link, True)
    if dist.get_world_size() > 1:
        found.append(_plain(_sum_inside(device)))
    bad, checks, node = _said(found), _checks(found), socket.gethostname()
    if bad:
        note("refused", worker=worker, node=node, checks=checks, cause=bad)
    else:
        note("admitted", worker=worker, seconds=time.monotonic() - begun, checks=checks)
    if unfit := [text for text in gather_objects(_sentence(worker, node, bad) if bad else "", secret) if text]:
        raise Unfit("; ".join(unfit))


def _sum_inside(device: torch.device) -> Found:
    """Of known numbers, over all ranks of this replica."""
    size = dist.get_world_size()
    total, begun = torch.full((_NUMEL,), float(dist.get_rank() + 1), device=device), time.monotonic()
    try:
        work = dist.all_reduce(total, async_op=True)
        while not work.is_completed():
            if time.monotonic() - begun > _START_S:
                raise ReplicaBroken(f"the sum with the other ranks of this replica, to admit them, did not end in {_START_S:g} s")
            time.sleep(0.001)
        work.wait()
    except RuntimeError as error:
        raise ReplicaBroken(f"a rank of this replica is gone: {first_line(error)}") from error
    wrong = int((total != size * (size + 1) / 2).sum())
    rate = 2 * (size - 1) / size * 4 * _NUMEL / (time.monotonic() - begun) / 1e9
    return Found("all-reduce", str(device), "bad" if wrong else "ok", f"with the other ranks of its replica: {wrong} wrong elements", {"bus_gb_per_s": rate})


def _no_link(name: str, me: int) -> Link:
    raise AssertionError(f"{name}: nobody was named to sum with")


def _sum(device: torch.device, link: Link, me: int) -> Found:
    try:
        link.warm()
        mine, begun = torch.full((_NUMEL,), float(me + 1), device=device), time.monotonic()
        (total,) = link.sum([mine], lambda: False, SUM_S)
        wrong, took = int((total != 3.0).sum()), time.monotonic() - begun
    except (LinkBroken, DeadlineExceeded) as error:  # the neighbour may be needed elsewhere: that is not this device's fault
        return Found("all-reduce", str(device), "warning", f"not finished: {error}", {})
    finally:
        link.drop()
    state: Any = "bad" if wrong else "ok"
    return Found("all-reduce", str(device), state, f"with an idle spare: {wrong} wrong elements", {"bus_gb_per_s": 4 * _NUMEL / took / 1e9})


class Admission:
    """The controller's side. ``note(event, **fields)``: emits an event."""

    def __init__(self, config: WatchConfig, host: Host, note: Callable[..., None]):
        self._config, self._host, self._note = config, host, note
        self._unfit: dict[str, set[str]] = {}  # place (whom a process is to replace) -> nodes where one was refused
        self._names = itertools.count()

    def avoid(self, place: str, nodes: Sequence[str]) -> set[str]:
        """Nodes to start nothing on for this place, if there are others: of ``nodes``, those of the run."""
        unfit = self._unfit.get(place, set())
        return unfit if set(nodes) - unfit else set()

    def found_no_room(self, place: str) -> None:
        """Elsewhere there is none either: it is tried where one was refused."""
        self._unfit.pop(place, None)

    def admit(self, worker: str, place: str, idle: Sequence[str]) -> None:
        """Let a new process examine its device, with the help of one of the ``idle`` spares. Raises Unfit."""
        if self._config.admission == "never":
            return
        begun = time.monotonic()
        neighbour = next((w for w in idle if w != worker and w in self._host.infos), None)
        calls = self._begin(worker, neighbour)
        found = self._found(worker, calls[0], begun)
        if neighbour and self._host.wait(calls[1:], SUM_S):
            try:
                self._host.result(calls[1], neighbour, f"the admission of {worker}")
            except (ProcessEnded, EverstepError) as error:
                LOG.info("%s did not help to admit %s: %s", neighbour, worker, error)  # its death is told elsewhere
        try:
            self._judge(worker, found, begun)
        except Unfit:
            self._unfit.setdefault(place, set()).add(self._host.infos[worker].node_id)
            raise

    def admit_all(self, workers: Sequence[str]) -> None:
        """At the start of a run, if so configured: all at once, each with a neighbour. Raises Unfit, which names all that are."""
        if self._config.admission != "all":
            return
        begun = time.monotonic()
        calls: dict[str, Any] = {}
        for one, other in itertools.zip_longest(workers[::2], workers[1::2]):
            calls |= dict(zip((one, other), self._begin(one, other, both=True), strict=False))
        refused = []
        for worker, call in calls.items():
            try:
                self._judge(worker, self._found(worker, call, begun), begun)
            except Unfit as unfit:
                refused.append(str(unfit))
        if refused:
            raise Unfit("; ".join(refused))

    def _begin(self, worker: str, neighbour: str | None, both: bool = False) -> list[Any]:
        name = f"admission-{next(self._names)}" if neighbour else ""
        calls = [self._host.submit(worker, None, "admit", name, 0, True)]
        return calls + ([self._host.submit(neighbour, None, "admit", name, 1, both)] if neighbour else [])

    def _found(self, worker: str, call: Any, begun: float) -> list[dict[str, Any]]:
        limit_s = _START_S + 2 * self._config.admission_s
        while not self._host.wait([call], 0.1):
            if time.monotonic() - begun > limit_s:
                return [_bad(f"no answer in {limit_s:g} s")]
        try:
            found: list[dict[str, Any]] = self._host.result(call, worker, "its admission")
        except (ProcessEnded, EverstepError) as error:
            return [_bad(f"its process ended: {error}")]
        return found

    def _judge(self, worker: str, found: Sequence[Mapping[str, Any]], begun: float) -> None:
        bad, checks = _said(found), _checks(found)
        if not bad:
            self._note("admitted", worker=worker, seconds=time.monotonic() - begun, checks=checks)
            return
        host = self._host.infos[worker].host
        self._note("refused", worker=worker, node=host, checks=checks, cause=bad)
        raise Unfit(_sentence(worker, host, bad))


def _plain(found: Found) -> dict[str, Any]:
    """As it travels: of what was examined is known where."""
    return {"name": found.name, "state": found.state, "told": found.told, "measured": found.measured}


def _said(found: Sequence[Mapping[str, Any]]) -> str:
    """What is wrong; empty if nothing is."""
    return "; ".join(f"{f['name']}: {f['told']}" for f in found if f["state"] == "bad")


def _checks(found: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    return {f["name"]: " ".join([f["state"], *(f"{value:.3g} {name}" for name, value in f["measured"].items())]) for f in found}


def _sentence(worker: str, node: str, bad: str) -> str:
    return f"{worker} on {node} is not fit to take part: {bad}; run `everstep doctor` there"


def _bad(told: str) -> dict[str, Any]:
    return {"name": "device", "state": "bad", "told": told, "measured": {}}
