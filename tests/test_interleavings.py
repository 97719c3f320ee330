"""The protocol under chosen and random interleavings: the real coordinator, desk, transactions, ledgers and links, without processes.

Every world that is explored ends with every step committed, every state right to the last element, and the history checker content.
Then each rule is broken on purpose, and the same exploration must find it.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.support.interleaving import (
    Action,
    MemoryControl,
    MemoryHealing,
    MemoryWorld,
    Mode,
    Rank,
    Setting,
    Violation,
    World,
    at_random,
    explore,
)

from everstep.recovery import coordinator as coordinator_module
from everstep.recovery import transaction as transaction_module
from everstep.recovery.coordinator import Build, Coordinator
from everstep.recovery.ledger import Ledger, SlotLedger, SumLedger
from everstep.recovery.transaction import Kept, Transaction
from everstep.recovery.view import Deal, Kind, View, Vote

SETTINGS = {
    "two deaths": Setting(),
    "exact": Setting(exact=True),
    "three deaths of four": Setting(replicas=4, slots=7, kills=3, spares=2),
    "no spares": Setting(spares=0),
    "replicas of two ranks": Setting(ranks=2, spares=2),
    "replicas of two ranks, both needed": Setting(replicas=2, ranks=2, spares=2, min_replicas=2),
    "links flap": Setting(kills=1, flaps=2),
    "links flap, exact, two ranks": Setting(ranks=2, kills=1, flaps=2, exact=True),
    "retry": Setting(mode=Mode.RETRY, flaps=1),
    "wait": Setting(mode=Mode.WAIT, spares=2),
    "wait, two ranks": Setting(mode=Mode.WAIT, ranks=2, spares=2),
    "no standbys": Setting(standbys_up_to=0),
    "a wrong bit": Setting(kills=1, spoilt=1),
    "nobody dies": Setting(kills=0),
    "a slot that kills": Setting(kills=0, replicas=4, poison=(2, 3)),
    "a slot that kills, exact, two ranks": Setting(kills=0, ranks=2, spares=1, poison=(2, 3), exact=True),
    "heals go on for long": Setting(replicas=3, spares=3, steps=6, kills=3, backlog=4),
    "heals are waited for": Setting(spares=2, steps=4, backlog=0),
    "heals go on for long, two ranks": Setting(replicas=2, ranks=2, spares=3, steps=5, kills=2, backlog=4),
    "a slot that kills, retry": Setting(kills=0, poison=(1, 0), mode=Mode.RETRY),
}
FEW, MANY = 25, 600


@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.timeout(900)
def test_whatever_the_order_nothing_is_lost_and_nothing_counts_twice(name, many):
    setting = SETTINGS[name]
    worlds = explore(setting, range(MANY if many else FEW), harm=0.03)
    assert not setting.kills or any(w.kills == 0 for w in worlds)  # they were struck
    assert not setting.flaps or any(w.flaps == 0 for w in worlds)
    assert not setting.spoilt or any(w.spoilt == 0 for w in worlds)
    assert all(len(w.log) >= setting.steps or w.held for w in worlds)


# -- named interleavings: who goes first, where, and who dies -------------------------------------------------------------------


def directed(setting: Setting, *script: tuple[str, object]) -> World:
    """Actions in the order in which they are found, but for the script: each entry waits until its predicate holds of the world, then
    does what it says: ``kill WORKER``, ``hold TEXT`` (no action whose name begins so), ``free TEXT``, ``first TEXT`` (prefer such)."""
    todo, held, first = list(script), [], []
    world: World

    def choose(actions: list[Action]) -> Action:
        while todo and todo[0][1](world):  # type: ignore[operator]
            verb, text = todo.pop(0)[0].split(" ", 1)
            if verb == "kill":
                return next(a for a in actions if a.name.startswith(f"KILL {text}("))
            {"hold": held.append, "free": held.remove, "first": first.append}[verb](text)
        possible = [a for a in actions if a.kind == "must" and not any(a.name.startswith(h) for h in held)]
        assert possible, (todo, held, [a.name for a in actions])
        preferred = [a for a in possible if any(a.name.startswith(f) for f in first)]
        return (preferred or possible)[0]

    world = World(setting, choose)
    world.run()
    assert not todo, f"the script was never over: {todo}; {world.trace}"
    return world


def told(worker: str, event: str, step: int):
    return lambda world: any(e.who == worker and e.event == event and e.step == step for e in world.events)


def has_commit(step: int):
    return lambda world: world.desk.coordinator.committed >= step


def test_rule_1_a_death_between_steps_while_some_have_begun_the_next_one_under_the_old_view():
    """A begins step 2 under the view of the commit, B only after the view without C: both go by the deal of the commit."""
    world = directed(
        Setting(spares=0, kills=1),
        ("hold w1(1b0/0): begin step 2", has_commit(1)),
        ("kill w2", told("w0", "compute", 2)),
        ("free w1(1b0/0): begin step 2", lambda w: w.desk.coordinator.view.replicas == (0, 1) and not w.ranks["w1"].down),
    )
    first = {e.who: (e.epoch, e["slots"]) for e in reversed(world.events) if e.event == "compute" and e.step == 2 and not e["salvage"]}
    assert first["w0"][0] < first["w1"][0] and first["w0"][1] == [0, 3] and first["w1"][1] == [1, 4]


@pytest.mark.parametrize("survivors_voted", [1, 2])
def test_rule_2_a_death_in_the_vote_commits_if_all_survivors_have_voted_and_else_voids(survivors_voted):
    script = [("hold w2(2b0/0): enters vote", lambda w: True), ("kill w2", lambda w: {"w0", "w1"} <= w.desk.coordinator.votes.keys())]
    if survivors_voted == 1:
        script = [("hold w2(2b0/0): enters vote", lambda w: True), ("hold w1(1b0/0): enters vote", lambda w: True),
                  ("kill w2", lambda w: "w0" in w.desk.coordinator.votes), ("free w1(1b0/0): enters vote", lambda w: w.ranks["w2"].noticed)]
    world = directed(Setting(spares=0, kills=1, steps=1), *script)
    (commit,) = [e for e in world.events if e.event == "commit"]
    assert commit.epoch == (1, 1 if survivors_voted == 2 else 2)
    assert bool([e for e in world.events if e.event == "compute" and e["salvage"]]) == (survivors_voted == 1)


def test_rule_4_the_ranks_of_a_replica_that_saw_different_views_act_on_one():
    world = directed(
        Setting(replicas=2, ranks=2, spares=0, kills=1, steps=1),
        ("hold w1(0b0/1) hears", lambda w: w.step == 1 and not w.ranks["w1"].down),
        ("kill w3", lambda w: told("w1", "computed", 1)(w) and told("w0", "computed", 1)(w)),
        ("free w1(0b0/1) hears", lambda w: not w.ranks["w0"].down and w.ranks["w3"].noticed and w.ranks["w0"].pause is not None),
    )
    epochs = {e.who: e.epoch for e in world.events if e.event == "vote"}
    assert epochs == {"w0": (1, 2), "w1": (1, 2)}


def test_rule_10_a_joiner_whose_link_is_built_enters_with_the_next_commit_and_not_before():
    soon = ("w3", "replica 1b0 is repaired", "w0(0b0/0) has link", "w2(2b0/0) has link")
    world = directed(Setting(kills=1, steps=4), *((f"first {text}", lambda w: True) for text in soon), ("kill w1", told("w0", "compute", 1)))
    join = next(e for e in world.events if e.event == "commit" and 1 in e["healing"])
    link = next(e["link"] for e in world.events if e.event == "link_build" and "1b1" in e["link"])
    assert len([name for name in world.trace if name.endswith(f"has link {link}")]) == 3 and join["members"] == [0, 1, 2]
    assert any(e.event == "heal_done" and e.step == join.step for e in world.events)


# -- each rule broken on purpose --------------------------------------------------------------------------------------------------


def deal_anew_in_every_view(patch) -> None:
    """Rule 1: survivors share all slots among themselves, as the view says, and not as the commit dealt them."""
    share = lambda self, members, healing: Deal(self.view.deal.number, tuple((m.replica, m.build) for m in members if m.replica not in healing))
    new_view = Coordinator._new_view

    def dealing(self, members, healing, cause, *, redeal, link_id=None):
        if not redeal:
            object.__setattr__(self.view, "deal", share(self, members, healing))
        return new_view(self, members, healing, cause, redeal=redeal, link_id=link_id)

    patch.setattr(Coordinator, "_new_view", dealing)


def wait_for_the_commit_only(patch) -> None:
    """Rule 2: who has voted does not look at views any more."""
    after = MemoryControl.after

    def deaf(self, number, timeout_s, what):
        if "the commit of" not in what:
            return after(self, number, timeout_s, what)
        return self.wait_for(lambda rs: next((r for r in rs if r.number > number and r.kind is Kind.COMMIT), None), timeout_s, what)

    patch.setattr(MemoryControl, "after", deaf)


def count_late_votes(patch) -> None:
    """Rule 2: votes of an epoch that is over count in the next one."""
    vote = Coordinator.vote
    patch.setattr(Coordinator, "vote", lambda self, v: vote(self, dataclasses.replace(v, epoch=self.view.epoch)))


def forget_contributions(patch) -> None:
    """Rule 3: a voided attempt takes the rank's own contribution with it."""
    void = Transaction._void

    def forgetful(self, record, step, cause):
        void(self, record, step, cause)
        ledgers[-1].held = ()

    ledgers = []
    for ledger in (SumLedger, SlotLedger):
        init = ledger.__init__

        def remembered(self, init=init):
            init(self)
            ledgers.append(self)

        patch.setattr(ledger, "__init__", remembered)
    patch.setattr(Transaction, "_void", forgetful)


def leave_alone(patch) -> None:
    """Rule 4: a rank does not ask the others of its replica."""
    agree = MemoryWorld.agree
    patch.setattr(MemoryWorld, "agree", lambda self, values, what: [values] if "view" in what or "ledgers" in what else agree(self, values, what))


def believe_totals(patch) -> None:
    """Rule 5: votes are counted, not compared."""
    patch.setattr(Coordinator, "_agree", lambda self, members: True)


def shuffle_the_log(patch) -> None:
    """Rule 6: the last message comes first."""

    def deliver(self, rank: Rank) -> None:
        rank.control.deliver(rank.down.pop())

    patch.setattr(World, "_deliver", deliver)


def name_links_by_members(patch) -> None:
    """Rule 9: a link is named by its members alone."""
    patch.setattr(coordinator_module, "link_name", lambda members, incarnation, number: "+".join(map(str, members)))


def name_a_standby_too_early(patch) -> None:
    """Rules 9 and 10: the first acknowledgement makes a link ready."""
    patch.setattr(Build, "ready", property(lambda self: bool(self.acknowledged)))


def evict_for_a_flap(patch) -> None:
    """Rule 10: a broken link, with everybody alive, has the same effect as none."""
    patch.setattr(Coordinator, "link_failed", lambda self, link_id, cause, void=False: [])


def add_in_the_engines_buffer(patch) -> None:
    """Rule 11: the second contribution is computed where the first one lies."""
    patch.setattr(SumLedger, "_secure", lambda self: setattr(self, "_own", self._gradients))


def enter_before_merging(patch) -> None:
    """Rule 11: a slot counts as held though its gradient was not taken in."""

    def fill(self, slots, compute):
        for portion in self._portions(slots):
            self._secure()
            contribution = compute(portion)
            if not self.held:
                self._take(portion, contribution)
            self.held = tuple(sorted((*self.held, *portion)))

    patch.setattr(Ledger, "fill", fill)


def divide_before_the_link(patch) -> None:
    """Rule 12: each gives the mean over its own share."""
    total = SumLedger.total

    def mean(self, link, inventory, *args, **kwargs):
        self._gradients = [g / max(1, len(self.held)) for g in self._gradients]
        return total(self, link, inventory, *args, **kwargs)

    patch.setattr(SumLedger, "total", mean)


def sum_in_place(patch) -> None:
    """Rule 14: a reduce writes over what was contributed."""
    total = SumLedger.total
    patch.setattr(SumLedger, "total", lambda self, link, inventory, stop, timeout_s, issued, in_place=False: total(
        self, link, inventory, stop, timeout_s, issued, in_place=True))


def take_all_that_is_missing(patch) -> None:
    """Rule 16: every survivor computes every missing slot."""
    patch.setattr(transaction_module, "assign", lambda slots, replicas: {r: tuple(slots) for r in replicas})


def join_without_healing(patch) -> None:
    """Rules 10 and 19: a joiner is believed to hold the version."""

    def pretend(self, work, view: View, one, stale) -> None:
        self._state.version = view.committed
        if not len(self._state.weights):
            self._state.weights = torch.zeros(5)

    patch.setattr(Transaction, "_catch_up", pretend)


def serve_the_living_state(patch) -> None:
    """Rule 19: what is not sent is not copied aside when the state changes."""
    patch.setattr(MemoryHealing, "before_change", lambda self: None)


def forget_what_was_kept(patch) -> None:
    """Rule 19: totals that were committed during a heal are not applied after it."""
    patch.setattr(Kept, "of", staticmethod(lambda work, outcome, total: Kept(work, transaction_module.Outcome.SKIP, total)))


def contribute_before_being_whole(patch) -> None:
    """Rule 19: a healing replica says that it holds the state."""
    patch.setattr(transaction_module, "Vote", lambda *args: Vote(*args[:7], True, *args[8:]))


def go_on_with_another_source(patch) -> None:
    """Rule 19: what came of a heal whose source died is not thrown away, but taken for the new one's."""
    join = MemoryHealing.join

    def resumed(self, view, one):
        arrived = self._stream.arrived if self._stream is not None else 0
        join(self, view, one)
        if self._stream is not None and arrived and self.rank.state.version is None:
            self._stream.arrived = arrived

    patch.setattr(MemoryHealing, "join", resumed)


def obey_views_of_a_former_life(patch) -> None:
    """Rule 4: the call of a step is obeyed although no view has let this life of the replica in."""
    patch.setattr(Transaction, "_has_entered", lambda self, records: True)


def leave_out_after_one_death(patch) -> None:
    """Rule 16: the first replica that dies of a slot puts it in quarantine."""
    death = Coordinator.death
    patch.setattr(Coordinator, "death", lambda self, *args: (setattr(self, "_quarantine_after", 1), death(self, *args))[1])


def count_what_was_dropped(patch) -> None:
    """Rule 16: the commit lists samples in quarantine as used, too."""
    record = Coordinator._record
    patch.setattr(Coordinator, "_record", lambda self, kind, **parts: record(
        self, kind, **parts | ({"samples": parts["samples"] + parts["dropped"]} if "dropped" in parts else {})))


MUTATIONS = [
    (deal_anew_in_every_view, Setting()),
    (wait_for_the_commit_only, Setting()),
    (count_late_votes, Setting()),
    (forget_contributions, Setting()),
    (leave_alone, Setting(ranks=2, spares=2)),
    (believe_totals, Setting(kills=0, spoilt=1)),
    (shuffle_the_log, Setting()),
    (name_links_by_members, Setting(flaps=2)),
    (name_a_standby_too_early, Setting()),
    (evict_for_a_flap, Setting(kills=0, flaps=1)),
    (add_in_the_engines_buffer, Setting()),
    (enter_before_merging, Setting()),
    (divide_before_the_link, Setting()),
    (sum_in_place, Setting()),
    (take_all_that_is_missing, Setting()),
    (join_without_healing, Setting(steps=5)),
    (serve_the_living_state, Setting(steps=5)),
    (forget_what_was_kept, Setting(steps=5)),
    (contribute_before_being_whole, Setting(steps=5)),
    (go_on_with_another_source, Setting(steps=6, spares=2)),
    (obey_views_of_a_former_life, Setting(mode=Mode.WAIT, spares=2)),
    (leave_out_after_one_death, SETTINGS["a slot that kills"]),
    (count_what_was_dropped, SETTINGS["a slot that kills"]),
]


SLOW = {go_on_with_another_source}


@pytest.mark.parametrize(
    ("mutation", "setting"), [pytest.param(m, s, id=m.__name__, marks=[pytest.mark.full] if m in SLOW else []) for m, s in MUTATIONS]
)
def test_exploration_finds_a_rule_that_is_broken_on_purpose(mutation, setting, monkeypatch):
    mutation(monkeypatch)
    for seed in range(400):
        try:
            World(setting, at_random(seed, 0.03)).run()
        except Violation:
            return
    pytest.fail(f"400 worlds, and nobody noticed: {mutation.__doc__}")
