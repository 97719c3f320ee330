"""The history checker: proves from the event logs of all processes what must always hold, or shows where it does not.

    everstep verify RUN

Each invariant of :data:`INVARIANTS` is checked over the whole log and reported with what was looked at (so that "held" cannot
mean "nothing to look at") or with its first counterexample. The log was written by the processes themselves, before they
acted (``begin``, ``vote``, ``fault``) or after (``commit`` once it is on disk, ``apply``); a process that was killed left whole lines.
"""

from __future__ import annotations

import bisect
import functools
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from everstep.checkpoint import manifest
from everstep.config.load import load_config
from everstep.recipes.resize import step_size
from everstep.recipes.schedule import learning_rate
from everstep.run_dir import checkpoints_in
from everstep.telemetry.applied import applied_once
from everstep.telemetry.events import Epoch, Event, epoch_key, of_kind, read_history
from everstep.telemetry.recoveries import account
from everstep.telemetry.rollout_history import stale_serving

Key = tuple[int, ...]
#: For the processes of a run to be gone, after its last word.
LEAVE_S = 10.0


@dataclass(frozen=True)
class Finding:
    """What became of one invariant. ``held`` None: the log holds nothing that could tell (``looked_at`` says why)."""

    number: int
    text: str
    held: bool | None
    looked_at: str
    counterexample: str = ""


class Broken(Exception):
    """An invariant does not hold; the message is the counterexample."""


@dataclass(frozen=True)
class Record:
    """One run folder's history, arranged for the checks."""

    folder: Path
    events: list[Event]

    def kind(self, *kinds: str) -> list[Event]:
        return of_kind(self.events, *kinds)

    def in_step(self, kind: str, step: int | None) -> list[Event]:
        """The events of this kind with this step. A run has many steps: looking through all events for each would take minutes."""
        return self._in_step.get((kind, step), [])

    @functools.cached_property
    def _in_step(self) -> dict[tuple[str, int | None], list[Event]]:
        found: dict[tuple[str, int | None], list[Event]] = defaultdict(list)
        for event in self.kind("death", "compute", "computed"):
            found[event.event, event.step].append(event)
        return found

    @functools.cached_property
    def _struck(self) -> set[str]:
        """Workers that fault injection killed."""
        return {e["worker"] for e in self.kind("fault") if "worker" in e.fields}

    def attempts(self) -> list[list[Event]]:
        """The events of each start of the run, and of what followed each rollback in it."""
        parts: list[list[Event]] = [[]]
        for event in self.events:
            if event.event in ("run_start", "rollback") and parts[-1]:
                parts.append([])
            parts[-1].append(event)
        return parts

    @functools.cached_property
    def _by_attempt(self) -> dict[tuple[str, int | None, Key], list[Event]]:
        found: dict[tuple[str, int | None, Key], list[Event]] = defaultdict(list)
        for event in self.kind("vote", "apply"):
            found[event.event, event.step, epoch_key(event.epoch)].append(event)
        return found

    @functools.cached_property
    def _computed(self) -> dict[tuple[str, int, int | None, int, int], list[Event]]:
        found: dict[tuple[str, int, int | None, int, int], list[Event]] = defaultdict(list)
        for event in self.kind("computed"):
            found[event.who, self._life(event), event.step, epoch_key(event.epoch)[0], event["deal"]].append(event)
        return found

    @functools.cached_property
    def _formed(self) -> dict[str, list[float]]:
        """When each process took a place in a replica. What it held before is void then."""
        found: dict[str, list[float]] = defaultdict(list)
        for event in self.kind("form"):
            found[event.who].append(event.t_wall)
        return found

    def _life(self, event: Event) -> int:
        return bisect.bisect_right(self._formed[event.who], event.t_wall)

    def computed_for(self, vote: Event) -> list[Event]:
        """What the voter computed of the step, in the deal of its vote and in the same life of its replica."""
        return self._computed.get((vote.who, self._life(vote), vote.step, epoch_key(vote.epoch)[0], vote["deal"]), [])

    def of_attempt(self, kind: str, commit: Event) -> list[Event]:
        """Events of this kind that belong to the attempt (step, epoch) which the commit made final."""
        return self._by_attempt.get((kind, commit.step, epoch_key(commit.epoch)), [])

    def suspects(self, commit: Event) -> set[int]:
        """Slots that a rank had begun to compute in this step which then died, struck by nobody, in the same run of it."""
        step, run = commit.step, self._run_of(commit)
        died = {e["worker"] for e in self.in_step("death", step) if "worker" in e.fields and self._run_of(e) == run} - self._struck
        return {slot for e in self.in_step("compute", step) if e.who in died and self._run_of(e) == run for slot in e["slots"]}

    @functools.cached_property
    def _starts(self) -> list[float]:
        return [event.t_wall for event in self.kind("run_start")]

    def _run_of(self, event: Event) -> int:
        return bisect.bisect_right(self._starts, event.t_wall)

    def given_by_the_dead(self, vote: Event, rank: int, slots: set[int]) -> list[int]:
        """Those of ``slots`` that a rank computed, in the deal of this vote, whose replica died in the epoch of the vote before it
        could vote itself. What died before had to be computed again."""
        if not slots:
            return []
        died = {e["replica"] for e in self.in_step("death", vote.step) if epoch_key(e.epoch) == epoch_key(vote.epoch)}
        found: set[int] = set()
        for event in self.in_step("computed", vote.step):
            same = (epoch_key(event.epoch)[0], event["deal"]) == (epoch_key(vote.epoch)[0], vote["deal"])
            if same and event["rank"] == rank and event["replica"] in died:
                found |= set(event["slots"])
        return sorted(found & slots)


def check(folder: str | os.PathLike[str]) -> list[Finding]:
    """All findings for a run folder, in the order of their numbers. Raises EventLogError if the log cannot be read."""
    path = Path(folder)
    record = Record(path, read_history(path / "events").events)
    findings = []
    invariants = dict(INVARIANTS)
    if record.kind("inner_step"):
        invariants |= SEMISYNC_INVARIANTS
    for number, (text, examine) in invariants.items():
        try:
            looked_at, enough = examine(record)
            findings.append(Finding(number, text, True if enough else None, looked_at))
        except Broken as broken:
            findings.append(Finding(number, text, False, "", str(broken)))
    return findings


# -- the checks: each returns (what it looked at, whether that was anything), or raises Broken ------------------------------


def equal_state(record: Record) -> tuple[str, bool]:
    verified = record.kind("verify")
    for event in verified:
        positions: dict[str, dict[str, str]] = defaultdict(dict)
        for rank, digest in event["hashes"].items():
            positions[rank.split("/")[1]][rank] = digest
        odd = {p: ranks for p, ranks in positions.items() if len(set(ranks.values())) > 1}
        if odd or not event["equal"]:
            raise Broken(f"step {event.step}: ranks of one position hold different state: {odd or event['hashes']}")
    commits, compared = record.kind("commit"), 0
    for commit in commits:
        digests: dict[int, set[int]] = defaultdict(set)
        votes = record.of_attempt("vote", commit)
        for vote in votes:
            if "digest" in vote.fields:
                digests[vote["rank"]].add(vote["digest"])
        if commit["kind"] == "skip" and not any(vote.get("finite", True) for vote in votes):
            digests = {rank: {0} for rank in digests}  # the bits of a NaN are anything, and nobody applies it
        if any(len(found) > 1 for found in digests.values()):
            raise Broken(f"step {commit.step}: members voted for totals with different digests: {dict(digests)}")
        compared += bool(digests)
    text = f"{len(verified)} comparisons of all ranks' state, {compared} of {len(commits)} commits with equal digests of the total"
    return text, bool(verified) and compared == len(commits)


def contiguous_and_applied_once(record: Record) -> tuple[str, bool]:
    books = account(record.events)
    if books.steps_missing or books.steps_doubled:
        raise Broken(f"steps missing {books.steps_missing[:3]}, committed or applied twice {books.steps_doubled[:3]}")
    for events in record.attempts():
        newest: int | None = None
        for event in of_kind(events, "run_start", "rollback", "commit"):
            if event.event == "commit" and newest is not None and event.step != newest + 1:
                raise Broken(f"step {event.step} was committed after step {newest}")
            newest = event.step
    applied, wrong = applied_once(record.events)
    if wrong:
        raise Broken(wrong)
    text = f"{books.committed} commits, applied {applied} times, each once by each process"
    return text, books.committed > 0


def samples_once(record: Record) -> tuple[str, bool]:
    books = account(record.events)
    if books.samples_lost or books.samples_doubled:
        raise Broken(f"samples lost {books.samples_lost[:3]}, used twice {books.samples_doubled[:3]}")
    given_up = {(e.step, sample) for e in record.kind("drop") for sample in e["samples"]}
    begun: dict[int | None, list[str]] = {}
    for event in record.kind("begin", "commit"):
        if event.event == "begin":
            begun[event.step] = event["samples"]
        elif event.step in begun:
            used = {*event["samples"], *(event.get("dropped") or ())}
            missing = {s for s in set(begun[event.step]) - used if not {(event.step, s), (None, s)} & given_up}
            if odd := sorted(missing | used - set(begun[event.step])):
                raise Broken(f"step {event.step}: samples {odd[:3]} are of its begin or of its commit, not of both")
    skipped = [s for c in record.kind("commit") if c["kind"] == "skip" for s in c["samples"]]
    return f"{books.samples_committed} samples, {len(skipped)} of them in skipped steps", books.samples_committed > 0


def one_membership_per_epoch(record: Record) -> tuple[str, bool]:
    members: dict[Key, list[int]] = {}
    newest: Key = ()
    for event in record.kind("view", "commit"):
        epoch = epoch_key(_epoch(event.get("next_epoch")) if event.event == "commit" else event.epoch)
        if members.setdefault(epoch, event["members"]) != event["members"]:
            raise Broken(f"epoch {epoch} has members {members[epoch]} and also {event['members']}")
        if epoch < newest:
            raise Broken(f"epoch {epoch} was published after epoch {newest}")
        newest = max(newest, epoch)
    worked = record.kind("compute", "vote")
    dead_at: dict[str, Key] = {}
    fenced: set[tuple[str, int]] = set()
    places: dict[tuple[Key, int, int], tuple[str, int]] = {}
    for event in record.events:
        if event.event == "run_start":
            dead_at.clear()  # its processes are others, by the same names
            places.clear()
        if event.event == "fenced":
            fenced.add((event.who, event.pid))
        if event.event == "adopted":
            fenced.discard((event.who, event.pid))
        if event.event in ("view", "commit"):
            newest = epoch_key(_epoch(event.get("next_epoch")) if event.event == "commit" else event.epoch)
        if event.event in ("death", "retire") and "worker" in event.fields:
            dead_at.setdefault(event["worker"], newest if event.event == "retire" else epoch_key(event.epoch))
        if event.event not in ("compute", "vote"):
            continue
        if event.event == "vote" and (event.who, event.pid) in fenced:
            raise Broken(f"step {event.step}: {event.who} voted after it had fenced itself")
        epoch = epoch_key(event.epoch)
        if epoch not in members or event["replica"] not in members[epoch]:
            raise Broken(f"step {event.step}: {event.who} of replica {event['replica']} worked in epoch {epoch}, "
                         f"whose members are {members.get(epoch)}")
        here = places.setdefault((epoch, event["replica"], event["rank"]), (event.who, event.pid))
        if here != (event.who, event.pid):
            raise Broken(f"step {event.step}: {event.who} (process {event.pid}) worked as rank {event['replica']}/{event['rank']} in epoch "
                         f"{epoch}, as did {here[0]} (process {here[1]})")
        if event.who in dead_at and epoch > dead_at[event.who]:
            raise Broken(f"step {event.step}: {event.who} worked in epoch {epoch}, but it was expelled in {dead_at[event.who]}")
    return f"{len(members)} epochs, {len(worked)} acts of members in them", bool(members)


def divisor_is_contribution(record: Record) -> tuple[str, bool]:
    commits = record.kind("commit")
    quarantined: dict[tuple[Key, int], list[int]] = {}  # by epoch and step: a commit gives another step to the same epoch
    for event in record.kind("view", "commit"):  # older logs do not say that nothing is in quarantine
        epoch = event.epoch if event.event == "view" else _epoch(event.get("next_epoch"))
        quarantined[epoch_key(epoch), (event.step or 0) + 1] = event.get("quarantined", [])
    for commit in commits:
        votes = record.of_attempt("vote", commit)
        if not votes:
            raise Broken(f"step {commit.step} was committed in epoch {commit.epoch} without a vote")
        said = {e["divisor"] for e in (*votes, *record.of_attempt("apply", commit)) if "divisor" in e.fields}
        if said != {commit["divisor"]}:
            raise Broken(f"step {commit.step}: committed divisor {commit['divisor']}, voted and applied {sorted(said)}")
        ledger = votes[0]["ledger"]
        left_out = set(quarantined.get((epoch_key(commit.epoch), commit.step or 0), ())) - set(ledger)
        if any(v["ledger"] != ledger for v in votes) or sorted({*ledger, *left_out}) != list(range(len(ledger) + len(left_out))):
            raise Broken(f"step {commit.step}: ledgers {[v['ledger'] for v in votes][:3]} are not every slot once (in quarantine: {sorted(left_out)})")
        dropped = commit.get("dropped") or []
        if bool(left_out) != bool(dropped):
            raise Broken(f"step {commit.step}: slots {sorted(left_out)} were left out, samples {dropped[:3]} are listed as dropped")
        if both := sorted(set(dropped) & set(commit["samples"])):
            raise Broken(f"step {commit.step}: samples {both[:3]} are listed as used and as dropped")
        if innocent := sorted(left_out - record.suspects(commit)):
            raise Broken(f"step {commit.step}: slots {innocent} were left out, but nobody died of them")
        held: dict[int, list[int]] = defaultdict(list)
        for vote in votes:
            held[vote["rank"]] += vote["held"]
            computed = sorted(s for e in record.computed_for(vote) for s in e["slots"])
            if computed != vote["held"]:
                raise Broken(f"step {commit.step}: {vote.who} says it holds slots {vote['held']}, it computed {computed} in deal {vote['deal']}")
        for rank, slots in held.items():
            given = slots + record.given_by_the_dead(votes[0], rank, set(ledger) - set(slots))
            if sorted(given) != ledger:
                raise Broken(f"step {commit.step}: the members' ranks {rank} together hold slots {sorted(given)}, the total {ledger}")
    return f"{len(commits)} commits: divisor, ledger and computed slots agree", bool(commits)


def faults_end(record: Record) -> tuple[str, bool]:
    faults = record.kind("fault", "death")
    over: dict[int, bool] = {}  # whether the run was over when the fault came: nothing can follow it then
    ended = False
    for event in record.events:
        ended = event.event == "run_end" or (ended and event.event != "run_start")
        over[id(event)] = ended
    for fault in faults:
        if over[id(fault)]:
            continue
        later = [e for e in record.events if e.t_wall >= fault.t_wall and e.event in ("commit", "error", "run_end")]
        if not later:
            raise Broken(f"after the {fault.event} of rank {fault['replica']}/{fault['rank']} in step {fault.step} nothing was "
                         "committed and nobody said why")
    ends = record.kind("run_end")
    while left := _left_over(record) if ends else []:
        if time.time() < ends[-1].t_wall + LEAVE_S:
            time.sleep(0.1)
            continue
        raise Broken(f"processes {left} of the run live on after its end")
    return f"{len(record.kind('fault'))} injected faults and {len(record.kind('death'))} deaths ended in progress or an error", True


def redo_is_bounded(record: Record) -> tuple[str, bool]:
    """A slot is computed again only if its owner died since, or if the coordinator dealt the step anew."""
    redone = computed = 0
    for events in record.attempts():
        deals = {e["deal"]: (e["dealt"], e.get("shift", 0)) for e in of_kind(events, "view", "commit")}
        died: dict[tuple[int, int | None], list[Key]] = defaultdict(list)
        for event in of_kind(events, "death"):
            died[event["replica"], event.step].append(epoch_key(event.epoch))
        owners: dict[tuple[int | None, int, int, int], Event] = {}  # (step, deal, rank, slot) -> who computed it last
        for event in of_kind(events, "compute"):
            deal, rank, replica = event["deal"], event["rank"], event["replica"]
            for slot in event["slots"]:
                computed += 1
                before = owners.get((event.step, deal, rank, slot))
                owner = before["replica"] if before else _dealt_to(slot, *deals.get(deal, ([], 0)))
                if event["salvage"] or before:
                    redone += 1
                    if not any(epoch < epoch_key(event.epoch) for epoch in died[owner, event.step]):
                        raise Broken(f"step {event.step}: rank {replica}/{rank} computed slot {slot} in epoch {event.epoch}, which replica "
                                     f"{owner} held, alive, in the same deal")
                elif owner != replica:
                    raise Broken(f"step {event.step}: rank {replica}/{rank} computed slot {slot}, which was dealt to replica {owner}")
                owners[event.step, deal, rank, slot] = event
    return f"{computed} slots computed (by every rank), {redone} of them because their owner had died", computed > 0


def inner_steps_are_of_their_slots(record: Record) -> tuple[str, bool]:
    """Semi-synchronous training: what a rank says it computed are exactly the slots of its inner steps, in ascending order, each once;
    and a death costs the inner steps of one round of its replica at most."""
    open_: dict[str, tuple[Event, list[Event]]] = {}
    made, islands = 0, set()
    for event in record.events:
        if event.event == "inner_step":
            islands.add(event.who)
            if event.who not in open_:
                raise Broken(f"step {event.step}: {event.who} made inner step {event['inner']} outside any computation")
            open_[event.who][1].append(event)
        elif event.event == "compute":
            open_[event.who] = event, []
        elif event.event == "computed":
            _, steps = open_.pop(event.who, (event, []))
            if not islands:
                continue
            slots = [slot for step in steps for slot in step["slots"]]
            inner = [step["inner"] for step in steps]
            if slots and (sorted(slots) != sorted(event["slots"]) or len(set(slots)) != len(slots)):
                raise Broken(f"step {event.step}: {event.who} computed slots {event['slots']}, its inner steps were on {slots}")
            if event["slots"] and not slots:
                raise Broken(f"step {event.step}: {event.who} computed slots {event['slots']} without an inner step")
            if inner != sorted(set(inner)) or any(i >= step["of"] for i, step in zip(inner, steps, strict=True)):
                raise Broken(f"step {event.step}: {event.who} made inner steps {inner} of {steps[0]['of']}")
            made += len(steps)
    lost = [steps for _, steps in open_.values() if steps]
    for steps in lost:
        if len(steps) > steps[0]["of"]:
            raise Broken(f"step {steps[0].step}: {steps[0].who} lost {len(steps)} inner steps of a round of {steps[0]['of']}")
    return f"{made} inner steps (by every rank), {sum(map(len, lost))} more in rounds that their rank did not finish", made > 0


def _dealt_to(slot: int, dealt: list[int], shift: int) -> int:
    """``shift``: by how many places slots were dealt to other replicas than usual."""
    return sorted(dealt)[(slot - shift) % len(dealt)] if dealt else -1


def checkpoints_complete(record: Record) -> tuple[str, bool]:
    saves = record.kind("save")
    folder = checkpoints_in(record.folder)
    named = manifest.pointed_at(folder)
    if saves and named is None:
        raise Broken(f"{len(saves)} checkpoints were saved, but {folder}/latest names none")
    if named is None:
        return "no checkpoint was written", False
    if reason := manifest.damage(named):
        raise Broken(f"{folder}/latest names {named.name}: {reason}")
    return f"{len(saves)} saved; {named.name} verified byte by byte", True


def state_is_continuous(record: Record) -> tuple[str, bool]:
    """A process applies each step to the state of the step before, and computes with it: also one that healed, and kept totals until
    it had the state."""
    version: dict[str, int | None] = {}
    healed = acts = 0
    for event in record.events:
        who = event.who
        if event.event == "form":
            version[who] = None if event.get("build") else 0
        elif event.event in ("load", "heal_done") and who in version:
            healed += event.event == "heal_done"
            version[who] = event.step
        elif who in version and event.step is not None and (event.event in ("apply", "skip") or (event.event == "compute" and event["slots"])):
            acts += 1
            held = version[who]
            if held != event.step - 1:
                raise Broken(f"step {event.step}: {who} has an event {event.event}, but holds the state of {'no step' if held is None else f'step {held}'}")
            if event.event != "compute":
                version[who] = event.step
    return f"{acts} computations and updates, each on the state of the step before; {healed} heals", acts > 0


def steps_have_their_size(record: Record) -> tuple[str, bool]:
    """recovery.on_resize: samples and learning rate follow from the replicas to which the commit before dealt the step. Of recipe sft."""
    file = record.folder / "configs" / "resolved.yaml"
    if not file.exists():
        return "no configuration to compare with", False
    config = load_config(file, [])
    begins = record.kind("begin")
    if config.recipe != "sft":
        return f"{len(begins)} steps; recipe {config.recipe} does not change them", bool(begins)
    if config.semisync.method != "none":
        return f"{len(begins)} rounds; islands have batches of their own", bool(begins)
    dealt, smaller = 0, 0
    for event in record.events:
        if event.event == "commit" or (event.event == "view" and (event["cause"] == "start" or event["cause"].startswith("checkpoint"))):
            dealt = len(event["dealt"])
        if event.event != "begin" or "lr" not in event.fields:
            continue
        assert event.step is not None
        size = step_size(config, config.sft.samples_per_step, learning_rate(config.optimizer, event.step, config.sft.steps), dealt)
        smaller += size.samples < config.sft.samples_per_step
        if len(event["samples"]) != size.samples or event["lr"] != size.lr:
            raise Broken(f"step {event.step}: {len(event['samples'])} samples at learning rate {event['lr']}, but dealt to {dealt} replicas "
                         f"it has {size.samples} at {size.lr} (recovery.on_resize={config.recovery.on_resize})")
    return f"{len(begins)} steps, {smaller} of them smaller", bool(begins)


def engines_serve_whole_weights(record: Record) -> tuple[str, bool]:
    looked_at, wrong = stale_serving(record.events)
    if wrong:
        raise Broken(wrong)
    return f"{looked_at} completions by rollout engines" if looked_at else "no rollout engine completed anything", looked_at > 0


INVARIANTS: dict[int, tuple[str, Callable[[Record], tuple[str, bool]]]] = {
    1: ("members hold equal state at every comparison, and equal totals at every commit", equal_state),
    2: ("committed steps are contiguous, each applied exactly once by each member", contiguous_and_applied_once),
    3: ("each sample is used exactly once per pass, or listed with a reason", samples_once),
    4: ("one membership per epoch; epochs grow; an expelled process never contributes", one_membership_per_epoch),
    5: ("the divisor equals what was contributed; every slot counts once", divisor_is_contribution),
    7: ("the pointer names a complete, checksummed checkpoint", checkpoints_complete),
    8: ("every fault ends in progress or a typed error; no process is left", faults_end),
    9: ("a slot is computed again only if its owner died, or if the step was dealt anew", redo_is_bounded),
    10: ("a rollout engine serves only weights that it has got whole, and says which", engines_serve_whole_weights),
    11: ("each step is computed with, and applied to, the state of the step before", state_is_continuous),
    12: ("samples and learning rate of a step follow from the replicas that the commit before dealt it to", steps_have_their_size),
}
#: Of runs in which replicas make inner steps by themselves (semisync.method).
SEMISYNC_INVARIANTS: dict[int, tuple[str, Callable[[Record], tuple[str, bool]]]] = {
    11: ("the slots of a round are those of its inner steps; a death costs one replica's inner steps of one round", inner_steps_are_of_their_slots),
}


def _epoch(value: object) -> Epoch | None:
    return tuple(value) if isinstance(value, list | tuple) else value  # type: ignore[return-value]


def _left_over(record: Record) -> list[int]:
    """Processes of the run that still run on this machine under the same start time (ids are used again)."""
    return [pid for pid in sorted(set(_pids(record))) if _is_ours(pid, record.folder)]


def _pids(record: Record) -> Iterator[int]:
    here = socket.gethostname()
    for event in record.events:
        if event.who != "lead" and event.host == here:
            yield event.pid


def _is_ours(pid: int, folder: Path) -> bool:
    """Whether the process has an event file of this run open: that is what makes it a process of the run."""
    try:
        files = list(Path(f"/proc/{pid}/fd").iterdir())
        return any(os.path.realpath(f).startswith(str((folder / "events").resolve())) for f in files)
    except OSError:
        return False  # gone, or not ours to look at


def print_findings(findings: Sequence[Finding], out: TextIO) -> None:
    """Two lines for each invariant: whether it held, and on what evidence, or the counterexample."""
    for finding in findings:
        word = {True: "held", False: "BROKEN", None: "nothing to look at"}[finding.held]
        print(f"{finding.number:>2}  {word:<7} {finding.text}\n            {finding.counterexample or finding.looked_at}", file=out)


def worst(findings: Sequence[Finding]) -> bool:
    """Whether any invariant is broken."""
    return any(finding.held is False for finding in findings)
