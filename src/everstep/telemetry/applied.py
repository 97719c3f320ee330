"""Whether every process applied each commit that it voted for, once, or ended before it could: for the history checker.

Asked of each process in each of its lives, from one ``form`` to the next: what another rank of its replica applied is no evidence for
it, and a death excuses nobody who had gone on without the commit.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from everstep.telemetry.events import Event, epoch_key

_ANSWERS = ("apply", "skip", "keep")  # keep: by a rank that heals; that it applies it later, the continuity of its state shows
_ACTS = ("compute", "vote", *_ANSWERS)
#: Clocks of two machines may differ by so much.
SKEW_S = 1.0

Attempt = tuple[int, tuple[int, ...]]  # (step, epoch)


@dataclass
class _Life:
    """Of a process in its replica. ``since`` and ``until``: when it, and the next one, formed."""

    who: str
    since: float = float("-inf")
    until: float = float("inf")
    acts: list[Event] = field(default_factory=list)


@dataclass
class _Run:
    """One start of the run, up to the next one, whose processes are others by the same names."""

    lives: list[_Life] = field(default_factory=list)
    commits: list[Event] = field(default_factory=list)
    ends: list[Event] = field(default_factory=list)  # what may have ended a life
    done: bool = False

    def has_ended(self, life: _Life, replica: int) -> bool:
        """Whether the log says why a life did nothing more: its process, or another rank of its replica, died or had fenced itself, or
        another coordinator went on without the replica."""
        for event in self.ends:
            if not life.since - SKEW_S <= event.t_wall < life.until + SKEW_S:
                continue
            if event.event == "takeover":
                ended = replica not in event["members"]
            else:
                ended = event["replica"] == replica or life.who in (event.get("worker"), event.who)
            if ended:
                return True
        return False


def applied_once(events: Sequence[Event]) -> tuple[int, str]:
    """How often commits were applied, and the first counterexample, or "". ``events``: merged by wall time."""
    commits = {_attempt(event): event for event in events if event.event == "commit"}
    applied = 0
    for run in _runs(events):
        for life in run.lives:
            if wrong := _uncalled(run, life, commits):
                return applied, wrong
            answers: dict[Attempt, list[Event]] = defaultdict(list)
            for act in life.acts:
                if act.event in _ANSWERS:
                    answers[_attempt(act)].append(act)
            for index, vote in enumerate(life.acts):
                commit = commits.get(_attempt(vote)) if vote.event == "vote" else None
                if commit is None:
                    continue
                found = answers.get(_attempt(vote), [])
                if wrong := _wrong(life, commit, found) or ("" if found else _unapplied(run, life, index, commit)):
                    return applied, wrong
                applied += any(act.event != "keep" for act in found)
    return applied, _without_vote(events)


def _uncalled(run: _Run, life: _Life, commits: dict[Attempt, Event]) -> str:
    """Answers to what is no commit, or to one that the process did not vote for."""
    voted = {_attempt(act) for act in life.acts if act.event == "vote"}
    newest = max((_attempt(commit)[0] for commit in run.commits), default=0)
    for act in life.acts:
        if act.event not in _ANSWERS:
            continue
        if _attempt(act) in commits and _attempt(act) not in voted:
            return f"step {act.step}: {life.who} has an event {act.event} for a total that it had not voted for"
        # Where no death is survived nobody waits for the commit, and the last one may not have come to be recorded.
        if _attempt(act) not in commits and _attempt(act)[0] <= newest:
            of = sorted(epoch for step, epoch in commits if step == act.step)
            return f"step {act.step}: {life.who} has an event {act.event} for the total of epoch {act.epoch}, commits are of {of}"
    return ""


def _wrong(life: _Life, commit: Event, found: Sequence[Event]) -> str:
    done = [act.event for act in found if act.event != "keep"]
    if any(kind != ("skip" if commit["kind"] == "skip" else "apply") for kind in done):
        return f"step {commit.step}: {life.who} answered a commit of kind {commit['kind']} with {done[0]}"
    if len(done) > 1:
        return f"step {commit.step}: {life.who} applied the commit {len(done)} times"
    return ""


def _unapplied(run: _Run, life: _Life, index: int, commit: Event) -> str:
    """A life voted, and does not say what it did with the commit. What follows shows whether it could have done anything."""
    step, epoch = _attempt(commit)
    for act in itertools.islice(life.acts, index + 1, None):
        if act.step is not None and (act.step > step or epoch_key(act.epoch) > epoch):
            return f"step {step}: {life.who} went on to {act.event} in step {act.step} without applying the commit"
    if run.has_ended(life, life.acts[index]["replica"]) or (not run.done and run.commits and commit is run.commits[-1]):
        return ""  # or the run was over before everybody had to have heard of its last commit
    return f"step {step}: {life.who} did not apply the commit that it voted for, and nothing says that it died"


def _without_vote(events: Sequence[Event]) -> str:
    """Ranks of members without whose vote a step was committed. Replicas that the commit leaves out had died by then."""
    members: dict[tuple[int, ...], list[int]] = {}
    voted: dict[Attempt, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for event in events:
        if event.event == "view":
            members[epoch_key(event.epoch)] = event["members"]
        elif event.event == "commit" and event.get("next_epoch") is not None:
            members[epoch_key(event["next_epoch"])] = event["members"]
        elif event.event == "vote":
            voted[_attempt(event)][event["replica"]].add(event["rank"])
    for commit in events:
        if commit.event != "commit":
            continue
        votes = voted[_attempt(commit)]
        ranks = {rank for found in votes.values() for rank in found}
        for replica in set(members.get(_attempt(commit)[1], ())) & set(commit["members"]):
            if silent := sorted(ranks - votes[replica]):
                return f"step {commit.step} was committed without the vote of rank {replica}/{silent[0]}, a member of epoch {commit.epoch}"
    return ""


def _attempt(event: Event) -> Attempt:
    return event.step or 0, epoch_key(event.epoch)


def _runs(events: Sequence[Event]) -> list[_Run]:
    runs = [_Run()]
    lives: dict[tuple[str, int], _Life] = {}  # of each process its present one
    for event in events:
        who = event.who, event.pid
        match event.event:
            case "run_start":
                runs.append(_Run())
                lives = {}
            case "run_end":
                runs[-1].done = event["status"] == "done"
            case "commit":
                runs[-1].commits.append(event)
            case "death" | "fenced" | "takeover":
                runs[-1].ends.append(event)
            case "form":
                if who in lives:
                    lives[who].until = event.t_wall
                lives[who] = _Life(event.who, event.t_wall)
                runs[-1].lives.append(lives[who])
            case kind if kind in _ACTS:
                if who not in lives:
                    lives[who] = _Life(event.who)
                    runs[-1].lives.append(lives[who])
                lives[who].acts.append(event)
    return runs
