"""The rollout pool's bookkeeping, without processes: nothing is lost, nothing is made twice, and stale engines get nothing."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.errors import InvariantViolated
from everstep.rl.rollout import Response, Sampling
from everstep.rl.rollout.decoding import Pending
from everstep.rl.rollout.requests import EngineState, Requests

PLACES, LENGTH = 4, 3


def piece(sample: str, number: int, version: int) -> Response:
    """Token ``number`` of a sample: who makes it, and how often it is begun again, does not change it."""
    return Response([hash(sample) % 1000 + number], [-0.5], [version])


def pool(engines: int = 2, poison_after: int = 2) -> Requests:
    requests = Requests(PLACES, poison_after)
    requests.want(1)
    for i in range(engines):
        ready(requests, f"e{i}")
    return requests


def ready(requests: Requests, name: str) -> None:
    requests.starting(name)
    requests.started(name)
    requests.syncing(name)
    requests.synced(name, requests.wanted_version)


def group(number: int, size: int = 2) -> list[tuple[str, Pending]]:
    return [(f"g{number}", Pending(f"g{number}#{k}", [1, 2])) for k in range(size)]


def advance(requests: Requests, name: str) -> None:
    """The engine makes one token for each sequence that it has."""
    engine = requests.engines[name]
    pieces = {}
    for sample, sequence in engine.has.items():
        made = len(sequence.made.tokens)
        pieces[sample] = piece(sample, made, engine.version), made + 1 == LENGTH
    requests.gained(name, pieces)


EVENTS = st.lists(
    st.tuples(st.sampled_from(["submit", "take", "take", "advance", "advance", "advance", "die", "stop", "start", "want", "sync", "fail", "late", "move"]),
              st.integers(0, 3)),
    max_size=120,
)


@settings(max_examples=300, deadline=None)
@given(events=EVENTS)
def test_every_sample_is_completed_once_or_dropped_with_a_reason_whatever_happens(events) -> None:
    requests, submitted, builds, version = pool(), 0, 2, 1
    held: dict[str, str] = {}  # sample -> the engine that last got it
    for kind, number in events:
        names = [name for name, engine in requests.engines.items() if engine.state is not EngineState.GONE]
        name = names[number % len(names)] if names else ""
        match kind:
            case "submit":
                requests.submit(group(submitted), Sampling(), version)
                submitted += 1
            case "take" if name:
                engine = requests.engines[name]
                before = set(engine.has)
                for sequence in requests.take(name):
                    assert engine.state is EngineState.READY and engine.version is not None
                    held[sequence.sample_id] = name
                assert len(engine.has) <= PLACES + 1, "a group is not cut"
                assert before <= engine.has.keys()
            case "advance" if name and requests.engines[name].state in (EngineState.READY, EngineState.STALE) and requests.engines[name].version:
                advance(requests, name)
            case "late":  # an engine that was taken for dead, or has nothing of the kind, speaks
                for dead in [n for n, e in requests.engines.items() if e.state is EngineState.GONE]:
                    requests.gained(dead, {sample: (piece(sample, 9, 0), True) for sample in held})
            case "move" if name and name not in (requests.idle or [name]):
                before = set(requests.engines[name].has)
                assert set(requests.move(name)) == before and not requests.engines[name].has
            case "die" | "stop" if name:
                lost = requests.gone(name, at_fault=kind == "die")
                assert not requests.engines[name].has and all(held[sample] == name for sample in lost)
            case "start":
                builds += 1
                requests.starting(f"e{builds}")
                requests.started(f"e{builds}")
            case "want":
                version += 1
                requests.want(version)
                assert all(e.state is not EngineState.READY or e.version == version for e in requests.engines.values())
            case "sync" | "fail":
                for stale in requests.stale[:1]:
                    requests.syncing(stale)
                    requests.synced(stale, version if kind == "sync" else None)
        owners = [sample for engine in requests.engines.values() for sample in engine.has]
        assert len(owners) == len(set(owners)), "a sequence is with one engine at most"
    # the end: one good engine finishes everything that is left
    ready(requests, "last")
    for name in [n for n, e in requests.engines.items() if n != "last" and e.state is not EngineState.GONE]:
        requests.gone(name, at_fault=False)
    everything = [sequence.sample_id for n in range(submitted) for _, sequence in group(n)]
    for _ in range(len(everything) * LENGTH + 1):
        requests.take("last")
        advance(requests, "last")
    assert not requests.missing(everything)
    complete = requests.collect(everything)
    assert complete.keys() | requests.dropped.keys() == set(everything) and not complete.keys() & requests.dropped.keys()
    for sample, response in complete.items():
        assert response.tokens == [hash(sample) % 1000 + k for k in range(LENGTH)], "each token once, in order"
        assert len(response.versions) == len(response.logprobs) == LENGTH


def test_a_sequence_of_which_engines_die_is_generated_alone_and_then_dropped() -> None:
    requests = pool(engines=1, poison_after=2)
    requests.submit([*group(0), *group(1)], Sampling(), 1)
    name = "e0"
    for build in (1, 2):
        assert {s.sample_id for s in requests.take(name)} == {"g0#0", "g0#1", "g1#0", "g1#1"}
        assert len(requests.gone(name, at_fault=True)) == 4 and not requests.dropped
        name = f"e{build}"
        ready(requests, name)
    assert [s.sample_id for s in requests.take(name)] == ["g0#0"], "a suspect has an engine to itself"
    assert requests.take(name) == []
    assert requests.gone(name, at_fault=True) == ["g0#0"]
    assert "3 rollout engines died" in requests.dropped["g0#0"]
    ready(requests, "e3")
    for sample in ("g0#1", "g1#0", "g1#1"):
        assert [s.sample_id for s in requests.take("e3")] == [sample]
        for _ in range(LENGTH):
            advance(requests, "e3")
    assert not requests.missing(["g0#0", "g0#1", "g1#0", "g1#1"]) and len(requests.complete) == 3


def test_deaths_on_purpose_make_no_suspects() -> None:
    requests = pool(engines=1, poison_after=1)
    requests.submit(group(0), Sampling(), 1)
    requests.take("e0")
    requests.gone("e0", at_fault=False)
    ready(requests, "e1")
    assert len(requests.take("e1")) == 2


def test_an_engine_with_older_weights_than_a_sequence_wants_does_not_get_it_and_finishes_what_it_has() -> None:
    requests = pool(engines=1)
    requests.submit(group(0), Sampling(), 1)
    requests.take("e0")
    requests.want(2)
    requests.submit(group(1), Sampling(), 2)
    assert requests.engines["e0"].state is EngineState.STALE and requests.take("e0") == []
    for _ in range(LENGTH):
        advance(requests, "e0")
    assert set(requests.complete) == {"g0#0", "g0#1"} and requests.complete["g0#0"].versions == [1] * LENGTH
    requests.syncing("e0")
    assert requests.engines["e0"].version is None
    requests.synced("e0", 2)
    assert [s.sample_id for s in requests.take("e0")] == ["g1#0", "g1#1"]


def test_sequences_that_are_sampled_otherwise_wait_until_the_engine_is_empty() -> None:
    requests = pool(engines=1)
    requests.submit(group(0, 1), Sampling(), 1)
    requests.submit(group(1, 1), Sampling(temperature=0.0), 1)
    assert [s.sample_id for s in requests.take("e0")] == ["g0#0"]
    for _ in range(LENGTH):
        advance(requests, "e0")
    assert [s.sample_id for s in requests.take("e0")] == ["g1#0"]


def test_what_cannot_be_is_refused() -> None:
    requests = pool()
    requests.submit(group(0), Sampling(), 1)
    with pytest.raises(InvariantViolated, match="g0#0 was given to the rollout pool twice"):
        requests.submit(group(0), Sampling(), 1)
    with pytest.raises(InvariantViolated, match="e0 cannot become syncing: it is ready"):
        requests.syncing("e0")
    with pytest.raises(InvariantViolated, match="e0 was started twice"):
        requests.starting("e0")


def test_what_was_made_before_a_run_was_resumed_is_gone_on_with() -> None:
    requests = pool(engines=1)
    requests.submit(group(0), Sampling(), 1)
    requests.take("e0")
    advance(requests, "e0")
    requests.submit(group(1), Sampling(), 1)
    begun = copy.deepcopy(requests.so_far(["g0#0", "g0#1", "g1#0", "g9#0"]))
    assert begun.keys() == {"g0#0", "g0#1"} and all(len(response.tokens) == 1 for response in begun.values())
    over = Response([5], [0.0], [1], finished=True, text="x")
    later = pool(engines=1)
    later.submit([("g0", Pending("g0#0", [1, 2], begun["g0#0"])), ("g0", Pending("g0#1", [1, 2], over))], Sampling(), 1)
    assert later.collect(["g0#0", "g0#1"]) == {"g0#1": over}
    assert [len(s.made.tokens) for s in later.take("e0")] == [1]


def test_after_the_run_went_back_nothing_is_left_and_no_weights_count_although_their_number_comes_again() -> None:
    requests = pool()
    requests.submit([*group(0), *group(1), *group(2)], Sampling(), 1)
    taken = [sequence.sample_id for sequence in requests.take("e0")]
    assert taken and requests.void() == {"e0": taken} and requests.stale == ["e0", "e1"]
    assert not any(requests.knows(f"g{n}#0") for n in range(3))
    requests.want(1)
    assert requests.stale == ["e0", "e1"] and requests.take("e1") == []
    requests.submit(group(0), Sampling(), 1)  # the same samples, to be made anew
