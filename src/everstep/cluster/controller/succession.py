"""What a controller does when it takes over from a dead one, and when no living replica holds the last committed step."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from everstep.cluster import takeover
from everstep.errors import RolledBack
from everstep.recovery import rendezvous
from everstep.recovery.commitlog import CommitLog
from everstep.recovery.coordinator import State
from everstep.recovery.view import Member

if TYPE_CHECKING:
    from everstep.cluster.controller.controller import Controller

_ANNOUNCING = threading.Lock()


def take_over(controller: Controller, log: CommitLog) -> None:
    start, adopting = time.monotonic(), takeover.Adopting(controller.config, controller._run_dir, controller._host, controller.server)
    assert controller._store is not None
    controller._store_address = controller._host.address, controller._store.port
    adopting.reach()
    announce(controller, log.incarnation)
    controller._host.watch(lambda worker: controller._process_ended(worker) if controller._crew.is_open else adopting.died.append(worker))
    decided = adopting.decide(log.past)
    controller._reference, controller.recipe_state = decided.reference, decided.state or {}
    controller._rollback.states |= log.past.states
    controller._copies.rollbacks += log.past.rollbacks
    controller._crew.open(list(decided.lives.values()), decided.spares, lambda: controller._reference, controller._store, adopting.first_number)
    controller._injector = controller._make_injector(adopting.faults_left())
    controller.server.take_over(decided.last, decided.commit, decided.members, controller.layout.replicas, adopting.noted)
    view = controller.server.coordinator.view
    controller._events.emit("takeover", step=view.committed, epoch=view.epoch.key, incarnation=log.incarnation, members=list(view.replicas),
                      workers=sorted(adopting.told), seconds=time.monotonic() - start)
    controller._crew.on_start = lambda: announce(controller, log.incarnation)
    for worker in sorted(adopting.missing):
        controller.server.expel(worker, "did not answer when its new controller took over")
    controller._crew.adopt(adopting.gone | adopting.missing, decided.broken)


def go_back(controller: Controller, member: Member) -> None:
    """Of the replica that was formed anew when no living one held the last committed step; on the repair's thread."""
    coordinator = controller.server.coordinator
    if back := controller._rollback.restore(member, coordinator.committed):
        controller.recipe_state, controller._went_back = back.state, RolledBack(back.step, back.cause)
        stranded = [m for m in coordinator.view.members if m.replica in coordinator.view.healing and m.replica != member.replica]
        controller.server.rollback(back.step, [member], back.cause, back.state)
        controller._crew.adopt(set(), stranded)


def save_interrupted(controller: Controller, saved_step: int) -> Path | None:
    """As ``Group.save_interrupted``. The state of the recipe is that of the commit record; ranks that wait in a held step leave it."""
    server = controller.server
    server.halt("the run was interrupted")  # nothing happens unless the step is held
    coordinator = server.coordinator
    state = controller._rollback.states.get(coordinator.committed)
    if coordinator.committed == saved_step:
        return controller.saver.wait()  # it may be on its way
    in_between = controller._in_step and coordinator.state is not State.HALTED
    return None if in_between or not state else controller.save(state)


def announce(controller: Controller, incarnation: int) -> None:
    """Workers that outlive their controller must find the next one."""
    assert controller._store is not None
    with _ANNOUNCING:  # else who began earlier could replace what names more workers
        if handle := controller._host.handle():
            at = controller._coordinator_address, (controller._host.address, controller._store.port)
            rendezvous.announce(controller._run_dir.path, rendezvous.Announcement(incarnation, *at, controller._token, os.getpid(), handle))
