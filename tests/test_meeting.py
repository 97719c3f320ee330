"""How ranks of one replica find each other: a real store, each rank a thread with a connection of its own, and lives that follow each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from tests.test_recovery import until

from everstep.cluster.worker.meeting import Meeting, open_store
from everstep.cluster.worker.run_store import serve_store
from everstep.errors import DeadlineExceeded

Make = Callable[[int, int], Meeting]


@pytest.fixture
def make() -> Iterator[Make]:
    """``make(rank, size)``: a process that torchrun has just started."""
    store = serve_store("127.0.0.1")
    connect = lambda: open_store("127.0.0.1", store.port, 10.0)
    meetings: list[Meeting] = []

    def made(rank: int, size: int) -> Meeting:
        meetings.append(Meeting(connect(), connect, rank, size))
        return meetings[-1]

    yield made
    for meeting in meetings:
        meeting.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def met(futures: list[Future[str]]) -> str:
    (life,) = {future.result(10.0) for future in futures}
    return life


def test_lives_follow_each_other_whoever_comes_first(make: Make, pool: ThreadPoolExecutor) -> None:
    """In the store are the names of the dead; rank 0 is there before its peers, and after them."""
    lives = set()
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        futures = []
        for rank in order:
            futures.append(pool.submit(make(rank, 3).agree, 10.0))
            time.sleep(0.15)
            assert not lives or rank == order[-1] or not any(f.done() for f in futures), "it met the dead"
        lives.add(met(futures))
    assert len(lives) == 3


def test_one_that_dies_before_all_have_agreed_is_waited_for_and_its_successor_belongs(make: Make, pool: ThreadPoolExecutor) -> None:
    with pytest.raises(DeadlineExceeded, match=r"had not met: nothing was heard of rank 0, 2; is the replica's torchrun running"):
        make(1, 3).agree(0.2)  # said hello, and is gone
    futures = [pool.submit(make(rank, 3).agree, 10.0) for rank in (0, 2)]
    time.sleep(0.3)
    assert not any(future.done() for future in futures)
    met([*futures, pool.submit(make(1, 3).agree, 10.0)])


def test_a_life_is_over_when_one_of_it_is_started_anew(make: Make, pool: ThreadPoolExecutor) -> None:
    """A machine whose torchrun was started again counts its starts from 0; the other one restarts its ranks when it hears of it."""
    ranks = [make(rank, 2) for rank in range(2)]
    first = met([pool.submit(rank.agree, 10.0) for rank in ranks])
    ended: list[str] = []
    over = threading.Event()
    ranks[0].watch(lambda cause: (ended.append(cause), over.set()))  # type: ignore[func-returns-value]
    assert not over.wait(0.7), "nothing has happened"
    later = pool.submit(make(1, 2).agree, 10.0)
    assert over.wait(5.0) and ended == ["rank 1 of this replica was started anew"]
    assert not later.done()
    assert met([later, pool.submit(make(0, 2).agree, 10.0)]) != first
    ranks[1].close()
    ranks[1].watch(ended.append)
    assert not until(lambda: len(ended) > 1, 0.7), "it was closed"
