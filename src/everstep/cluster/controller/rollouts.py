"""A controller's rollout engines (``rollout.engines``): their processes, their weights, and whose turn it is on devices that are shared."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from everstep.cluster.batch import TrainingBatch
from everstep.cluster.controller.owed import POLL_S
from everstep.rl.rollout import Response, Sampling, assemble
from everstep.rl.rollout.pool import RolloutPool
from everstep.rl.rollout.sync import Kind, off_key
from everstep.rl.rollout.turns import Turns

if TYPE_CHECKING:
    from everstep.cluster.controller.controller import Controller


class Rollouts:
    """Also what the pool needs of the launcher (everstep.rl.rollout.pool.Processes)."""

    def __init__(self, controller: Controller):
        self._controller, config = controller, controller.config
        self.pool = RolloutPool(config.rollout, bool(config.lora.rank), controller._host, self, controller._events, controller.layout.devices)
        colocated = config.rollout.colocated
        self.turns = Turns(self.pool.sleep, lambda: controller.call("pass_through", "make_room")) if colocated else Turns()

    def rollout(self, prompts: TrainingBatch, sampling: Sampling) -> TrainingBatch:
        controller, pool, start = self._controller, self.pool, time.monotonic()
        if not pool.has(prompts.sample_ids):
            self.ahead(prompts, sampling)
        while not pool.wait(prompts.sample_ids, POLL_S):
            controller._check_alive()
            if pool.stale:
                self._refit()
        complete, dropped = pool.collect(prompts.sample_ids)
        if dropped:
            reasons = "; ".join(sorted(set(dropped.values())))
            controller._events.emit("rollout_dropped", samples=sorted(dropped), reason=reasons)
        controller._events.emit("call", method="rollout", dispatch="engines", sent_bytes=prompts.nbytes, seconds=time.monotonic() - start)
        return assemble(prompts, complete | {sample: Response() for sample in dropped})  # as many rows as were asked for: steps are cut from them

    def make_way(self, workers: Collection[str]) -> None:
        """These take places in replicas: on their devices there is no engine any more."""
        for worker in workers:
            self.pool.vacate(worker)

    def ahead(self, prompts: TrainingBatch, sampling: Sampling, made: Mapping[str, Response] | None = None) -> None:
        self._controller._check_alive()
        self.turns.engines()
        if self._controller.config.rollout.on_spares:
            self.pool.serve_beside(self._controller._crew.idle_spares())
        self._controller._prepare_faults(self._controller.committed_step + 1)
        self._refit()
        self.pool.submit(prompts, sampling, self._controller.committed_step, made or {})

    def _refit(self) -> None:
        """Bring the committed weights to engines that lack them. One that misses them now gets them when somebody waits for samples."""
        self.pool.want(self._controller.committed_step)
        self.pool.refit(self._controller.committed_step, self._send_weights)

    def _send_weights(self, streams: Mapping[str, str], kind: Kind) -> bool:
        """Let a contributing replica serve rollout engines; False if it broke."""
        controller = self._controller
        view = controller.server.coordinator.view
        if not view.contributors:  # they died meanwhile; whoever waits for samples finds out
            return False
        member = view.member(view.contributors[0])
        assert member is not None
        called, life = [(worker, member) for worker in member.workers], controller.server.meant_for(member)
        calls = {
            controller._host.submit(worker, life, "send_weights", dict(streams), view.committed, kind): index
            for index, worker in enumerate(member.workers)
        }
        return controller._results(calls, called, "send_weights") is not None

    # -- what the pool needs -------------------------------------------------------------------------------------------------

    def expel(self, worker: str, cause: str) -> None:
        self._controller.server.expel(worker, cause)

    def start_engine(self, name: str, where: str) -> None:
        run_dir = self._controller._run_dir
        spec = dataclasses.replace(self._controller._spec("w0"), worker_id=name, log_path=str(run_dir.engine_log(name)), role="engine")
        self._controller._host.add(spec, where)

    def end_engine(self, name: str) -> None:
        self._controller.server.retire(name, "planned leave")
        self._controller._host.end(name)

    def call_off(self, stream: str) -> None:
        assert self._controller._store is not None
        self._controller._store.set(off_key(stream), "1")
