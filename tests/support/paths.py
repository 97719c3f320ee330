"""Which way a run took through a death, read from its event log: what became of the step in progress, and who took the place."""

from __future__ import annotations

from tests.support.runs import Finished

from everstep.telemetry.events import epoch_key


def ways(run: Finished) -> tuple[str, ...]:
    """One phrase for each death of a rank: STEP/PLACE.

    STEP: ``salvaged`` (others computed what the dead one held, and nothing else), ``stood`` (the step was committed under the view in
    which it died, or had been), ``waited`` (nobody could compute it until a replica was back), ``anew`` (it was dealt anew), ``back`` (all
    went back to an older step), ``held`` (what was lost was of no use for the step: the replica healed). PLACE: ``spare``, ``started``
    (a process that was started for it), ``nobody``.
    """
    first = int(run.kind("run_start")[0]["spares"]) + len({(e["replica"], e["rank"]) for e in run.kind("form") if e["build"] == 0})
    return tuple(f"{_step(run, death)}/{_place(run, death, first)}" for death in run.kind("death") if death["replica"] >= 0)


def _step(run: Finished, death) -> str:
    later = [e for e in run.events if e.t_wall >= death.t_wall]
    if any(e.event == "rollback" for e in later):
        return "back"
    computed = [e for e in run.kind("computed") if e.step == death.step and epoch_key(e.epoch) > epoch_key(death.epoch) and e["slots"]]
    commits = [e for e in run.kind("commit") if e.step == death.step]
    if commits and commits[-1].epoch == death.epoch:
        return "stood"
    if any(e["salvage"] for e in computed):
        return "salvaged"
    view = next((e for e in later if e.event == "view"), None)
    if view is not None and not view["dealt"]:
        return "waited"
    deals = {e["deal"] for e in run.kind("computed") if e.step == death.step}
    return "anew" if len(deals) > 1 else "held"


def _place(run: Finished, death, first: int) -> str:
    taken = [e for e in run.kind("spare_used") if e.t_wall >= death.t_wall and (e["replica"], e["rank"]) == (death["replica"], death["rank"])]
    if not taken:
        return "nobody"
    return "spare" if int(taken[0]["spare"][1:]) < first else "started"
