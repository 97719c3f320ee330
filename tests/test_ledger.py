"""Ledgers over real links: whoever holds which slots, the total is the same; in exact mode to the last bit."""

from __future__ import annotations

import functools
import os
import random
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.support.processes import run_ranks

from everstep.errors import LedgersDiffer
from everstep.recovery import link as links
from everstep.recovery.ledger import Contribution, Ledger, SlotLedger, SumLedger
from everstep.recovery.link import Link

SLOTS, SIZES = 7, (11, 300)
never = lambda: False
DEALS = [  # slots of members 0, 1, 2, each in the order in which they are computed, and what is salvaged afterwards
    ([(0, 3, 6), (1, 4), (2, 5)], [(), (), ()]),
    ([(0, 3, 6), (1, 4), ()], [(2,), (5,), ()]),  # member 2 enters with nothing
    ([(), (), (0, 1, 2, 3, 4, 5, 6)], [(), (), ()]),
    ([(5, 2), (), (0,)], [(1,), (3, 6), (4,)]),
]


def gradient(slot: int) -> list[torch.Tensor]:
    """Numbers of very different sizes: their sum depends on the order of adding."""
    made = torch.Generator().manual_seed(slot)
    return [torch.randn(n, generator=made) * 10.0 ** (slot % 4 * 2) for n in SIZES]


class Engine:
    """As the real one: the gradients of a computation lie in the same buffers every time."""

    def __init__(self) -> None:
        self.buffers = [torch.zeros(n) for n in SIZES]
        self.computed: list[tuple[int, ...]] = []

    def compute(self, slots: tuple[int, ...]) -> Contribution:
        self.computed.append(slots)
        for buffer in self.buffers:
            buffer.zero_()
        for slot in slots:
            for buffer, part in zip(self.buffers, gradient(slot), strict=True):
                buffer += part
        return Contribution(self.buffers, torch.tensor([float(len(slots)), sum(1e-3 * 3**s for s in slots)], dtype=torch.float64))


def make_link(rank: int, name: str, replicas: tuple[int, ...]) -> Link:
    store = dist.TCPStore("127.0.0.1", int(os.environ["EVERSTEP_TEST_STORE_PORT"]), is_master=False, timeout=timedelta(seconds=30))
    return Link(name, replicas, rank, 0, store, torch.device("cpu"), 20.0)


def _totals(rank: int) -> list[tuple[torch.Tensor, list[torch.Tensor], int]]:
    links.BUCKET_BYTES = 256  # several windows
    found = []
    for number, (dealt, salvaged) in enumerate(DEALS):
        for exact in (False, True):
            link = make_link(rank, f"deal-{number}-{exact}", (0, 1, 2))
            ledger: Ledger = SlotLedger() if exact else SumLedger()
            engine = Engine()
            assert ledger.open(1) and not ledger.open(1)
            ledger.fill(dealt[rank], engine.compute)
            missing = ledger.exchange(link, SLOTS, never, 20.0).missing()
            assert missing == tuple(sorted(s for part in salvaged for s in part))
            if salvaged[rank]:
                ledger.fill(salvaged[rank], engine.compute)
            inventory = ledger.exchange(link, SLOTS, never, 20.0)
            assert not inventory.missing()
            before = [g.clone() for g in engine.buffers]
            issued: list[int] = []
            total = ledger.total(link, inventory, never, 20.0, functools.partial(issued.append, 1))
            assert issued == [1] and all(torch.equal(a, b) for a, b in zip(before, engine.buffers, strict=True))
            found.append((inventory.sums, total, len(engine.computed)))
            link.drop()
    return found


def test_every_way_to_deal_and_salvage_gives_the_total_and_exact_mode_gives_its_bits():
    members = run_ranks(_totals, 3, join=False, deadline_s=120)
    wanted = [sum(gradient(s)[i].double() for s in range(SLOTS)) for i in range(len(SIZES))]
    for of_member in zip(*members, strict=True):
        for sums, total, _ in of_member[1:]:  # bitwise the same on all members
            assert torch.equal(sums, of_member[0][0]) and all(torch.equal(a, b) for a, b in zip(total, of_member[0][1], strict=True))
        for part, right in zip(of_member[0][1], wanted, strict=True):
            assert torch.allclose(part.double(), right, rtol=1e-5, atol=1e-2)
    exact = [found for i, found in enumerate(members[0]) if i % 2]
    summed = [found for i, found in enumerate(members[0]) if not i % 2]
    for sums, total, _ in exact[1:]:
        assert torch.equal(sums, exact[0][0]) and all(torch.equal(a, b) for a, b in zip(total, exact[0][1], strict=True))
    assert any(not torch.equal(total[1], summed[0][1][1]) for _, total, _ in summed[1:])  # what exact mode is for


def _doubled(rank: int) -> str:
    link = make_link(rank, "doubled", (0, 1, 2))
    ledger, engine = SumLedger(), Engine()
    ledger.open(1)
    ledger.fill(((0, 1), (1, 2), (3, 4, 5, 6))[rank], engine.compute)
    with pytest.raises(LedgersDiffer) as error:
        ledger.exchange(link, SLOTS, never, 20.0)
    return str(error.value)


def test_a_slot_that_two_members_hold_is_never_averaged_away():
    assert set(run_ranks(_doubled, 3, join=False)) == {"slot 1 is held by replicas 0 and 1"}


@pytest.mark.parametrize("ledger", [SumLedger(), SlotLedger()], ids=["sum", "slots"])
def test_an_interrupted_computation_leaves_the_ledger_as_it_was_and_a_new_deal_empties_it(ledger):
    alone = Link("alone", (0,), 0, 0, dist.HashStore(), torch.device("cpu"), 1.0)
    engine = Engine()
    ledger.open(1)
    ledger.fill((0, 1), engine.compute)

    def interrupted(slots: tuple[int, ...]) -> Contribution:
        engine.buffers[0] += 1e6  # half of it is done
        raise RuntimeError("the link broke, or a rank died")

    with pytest.raises(RuntimeError):
        ledger.fill((2,), interrupted)
    assert ledger.held == (0, 1)
    ledger.fill(tuple(range(2, SLOTS)), engine.compute)
    inventory = ledger.exchange(alone, SLOTS, never, 1.0)
    total = ledger.total(alone, inventory, never, 1.0, lambda: None)
    wanted = sum(gradient(s)[0].double() for s in range(SLOTS))
    assert torch.allclose(total[0].double(), wanted, rtol=1e-5, atol=1e-2) and float(inventory.sums[0]) == SLOTS
    with pytest.raises(LedgersDiffer, match="held already"):
        ledger.fill((3,), engine.compute)
    assert ledger.open(2) and ledger.held == ()
    order = list(range(SLOTS))
    random.Random(0).shuffle(order)
    for slot in order:
        ledger.fill((slot,), engine.compute)
    again = ledger.total(alone, ledger.exchange(alone, SLOTS, never, 1.0), never, 1.0, lambda: None)
    assert isinstance(ledger, SumLedger) or all(torch.equal(a, b) for a, b in zip(total, again, strict=True))
