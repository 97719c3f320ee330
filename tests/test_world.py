"""A replica's world while it is made: whoever waits in it for a rank that is gone can be called off, and make another one."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from everstep.cluster.worker import world
from everstep.cluster.worker.run_store import serve_store
from everstep.engine.groups import close_groups
from everstep.errors import BadInput, CoordinatorLost, ReplicaBroken


def test_who_waits_for_the_address_of_a_dead_rank_is_called_off_and_then_makes_another_world():
    main, gone = serve_store("127.0.0.1"), threading.Event()
    connected = lambda: dist.TCPStore("127.0.0.1", main.port, is_master=False, timeout=timedelta(seconds=60))

    def look() -> None:
        if gone.is_set():
            raise ReplicaBroken("a rank is gone")

    threading.Timer(0.5, gone.set).start()
    begun, store = time.monotonic(), world.WatchedStore(connected(), look)
    with pytest.raises(ReplicaBroken, match="a rank is gone"):
        dist.init_process_group("gloo", store=dist.PrefixStore("one", store), rank=0, world_size=2, timeout=timedelta(seconds=60))
    assert 0.4 < time.monotonic() - begun < 20.0
    close_groups()
    store = world.WatchedStore(connected(), lambda: None)
    dist.init_process_group("gloo", store=dist.PrefixStore("two", store), rank=0, world_size=1, timeout=timedelta(seconds=60))
    try:
        # Under the name by which processes that make their first world look for it.
        assert dist.distributed_c10d._get_default_group().group_name == "0"
        total = torch.ones(1)
        dist.all_reduce(total, group=dist.new_group([0]))
        assert total.item() == 1.0
    finally:
        close_groups()


def test_a_watched_store_is_the_store_and_waits_no_longer_than_it():
    store = world.WatchedStore(dist.HashStore(), lambda: None)
    prefixed = dist.PrefixStore("a", store)
    prefixed.set("k", "v")
    assert prefixed.get("k") == b"v" and prefixed.check(["k"]) and not prefixed.check(["other"])
    assert prefixed.add("n", 2) == 2 and prefixed.multi_get(["k"]) == [b"v"]
    with pytest.raises(dist.DistStoreError, match=r"wait timeout after 0.05 s, keys: a/other"):
        prefixed.wait(["other"], timedelta(seconds=0.05))


def test_what_an_error_means_while_a_replica_forms(monkeypatch):
    monkeypatch.setattr(world, "CALLED_OFF_S", 0.2)

    def raises(error: Exception | None):
        def look() -> None:
            if error:
                raise error

        return look

    unclear, closed = RuntimeError("what is this"), RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer")
    for error, said, found in [
        (closed, None, ReplicaBroken), (unclear, ReplicaBroken("gone"), ReplicaBroken), (unclear, None, unclear), (unclear, CoordinatorLost("lost"), CoordinatorLost),
        (BadInput("no such model"), ReplicaBroken("gone"), BadInput), (KeyError("a bug"), ReplicaBroken("gone"), KeyError), (MemoryError(), ReplicaBroken("gone"), MemoryError),
    ]:
        meant = world.explained(error, 1, raises(said))
        assert meant is found or isinstance(meant, found), (error, meant)  # type: ignore[arg-type]
    assert "what is this (while it formed)" in str(world.explained(unclear, 1, raises(ReplicaBroken("gone"))))
