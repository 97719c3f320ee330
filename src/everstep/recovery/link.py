"""Links: the communicators between the ranks of one position in different replicas.

A link is a raw c10d process group outside any ``torch.distributed`` world, so that it can be dropped and formed anew while the
replicas' own worlds live on. Nothing here blocks without looking at ``stop``: a work handle is polled together with the view,
because a collective whose peer died may never return (NCCL) or return only to the ring neighbours (gloo).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from everstep.errors import DeadlineExceeded, LinkBroken

BUCKET_BYTES = 64 << 20
_POLL_S = 0.0002


class Link:
    """All-reduce sums among ``replicas`` for one position.

    Args:
        name: the view's link id; the group's name in the store, never used twice.
        replicas: members in ascending order; ``me`` is one of them.
        position: rank inside the replica; each position has its own group.
        store: a connection to the run's store of this link's own: a group waits inside the store's client, which then serves
            nobody else in this process.
        timeout_s: deadline to form the group.
    """

    def __init__(
        self, name: str, replicas: Sequence[int], me: int, position: int, store: dist.Store, device: torch.device,
        timeout_s: float,
    ):
        self.name, self.replicas, self._device, self._timeout_s = name, tuple(replicas), device, timeout_s
        self._held: list[Any] = []  # buffers of unfinished collectives stay referenced until the group is gone
        self._group: Any = None
        if len(self.replicas) == 1:
            return  # a single survivor needs no link
        prefixed = dist.PrefixStore(f"link/{name}/{position}", store)
        rank, size = self.replicas.index(me), len(self.replicas)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options.config.blocking = False
            self._group = dist.ProcessGroupNCCL(prefixed, rank, size, options)
            self._group.eager_connect_single_device(device)
        else:
            self._group = dist.ProcessGroupGloo(prefixed, rank, size, timedelta(seconds=timeout_s))

    def warm(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Connect everybody now rather than in the first reduce."""
        self.sum([torch.ones(8, device=self._device)], stop, self._timeout_s)

    def sum(self, tensors: Sequence[torch.Tensor], stop: Callable[[], bool], timeout_s: float) -> list[torch.Tensor]:
        """Sums over the members, out of place: a broken reduce destroys nothing. Bitwise equal on all members.

        Tensors of one dtype are flattened into buckets of ``BUCKET_BYTES``. Raises LinkBroken if ``stop`` turns true or a
        member is gone, DeadlineExceeded after ``timeout_s``.
        """
        if self._group is None and len(self.replicas) > 1:
            raise LinkBroken(f"link {self.name} was dropped")
        totals = [t.detach().clone() for t in tensors]
        if self._group is None:
            return totals
        end = time.monotonic() + timeout_s
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=timeout_s)  # gloo's default would be the deadline to form the group
        pending = []
        for bucket in _buckets(totals):
            flat = bucket[0].reshape(-1) if len(bucket) == 1 else torch.cat([t.reshape(-1) for t in bucket])
            self._held.append(flat)
            try:
                work = self._group.allreduce([flat], options)
            except RuntimeError as error:
                raise LinkBroken(f"link {self.name}: {error}") from error
            pending.append((work, flat, bucket))
        for work, flat, bucket in pending:
            self._finish(work, stop, end, timeout_s)
            if len(bucket) > 1:
                for total, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                    total.copy_(part.view_as(total))
        self._held.clear()
        return totals

    def _finish(self, work: Any, stop: Callable[[], bool], end: float, timeout_s: float) -> None:
        while not work.is_completed():
            if stop():
                raise LinkBroken(f"link {self.name} was overtaken by a newer view")
            if time.monotonic() > end:
                raise DeadlineExceeded(
                    f"link {self.name}: a reduce took longer than {timeout_s:g} s (recovery.step_timeout_s)"
                )
            time.sleep(_POLL_S)
        if stop():
            raise LinkBroken(f"link {self.name} was overtaken by a newer view")  # after an abort NCCL work reports success
        try:
            work.wait()
        except RuntimeError as error:
            raise LinkBroken(f"link {self.name}: {error}") from error

    def drop(self) -> None:
        """Give the group up, off the critical path. Gloo: closing the sockets tells every other member, but first the destructor
        waits for a collective that still runs, until a member that computes leaves it too. NCCL: abort."""
        group, self._group = [self._group], None  # in a list: the thread shall let go of the last reference
        held, self._held = self._held, []
        if group[0] is not None:
            abort = self._device.type == "cuda"
            threading.Thread(target=_give_up, args=(group, held, abort), name=f"drop-{self.name}", daemon=True).start()


def _give_up(group: list[Any], held: list[Any], abort: bool) -> None:
    if abort:
        group[0].abort()
    group.clear()
    held.clear()


def _buckets(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors of one dtype that follow each other, in groups of at most BUCKET_BYTES (a larger tensor is its own bucket)."""
    buckets: list[list[torch.Tensor]] = []
    size = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if not buckets or buckets[-1][0].dtype != tensor.dtype or size + nbytes > BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(tensor)
        size += nbytes
    return buckets


def interruptible(build: Callable[[], Any], stop: Callable[[], bool], timeout_s: float, what: str) -> Any:
    """``build()`` in a thread of its own, given up when ``stop`` turns true: a group's constructor waits for members that may
    be dead by now. Raises LinkBroken."""
    result: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(build())
        except (RuntimeError, ValueError) as error:  # what c10d raises when the others do not come
            failure.append(error)

    thread = threading.Thread(target=run, name=f"build {what}", daemon=True)
    thread.start()
    end = time.monotonic() + timeout_s
    while thread.is_alive():
        if stop():
            raise LinkBroken(f"{what} was overtaken by a newer view while it was being formed")
        if time.monotonic() > end:
            raise LinkBroken(f"{what} was not formed in {timeout_s:g} s")
        thread.join(0.001)
    if failure:
        raise LinkBroken(f"{what} could not be formed: {failure[0]}") from failure[0]
    return result[0]


class Links:
    """The links of one rank, by name: the one in use, and one that is being built in the background."""

    def __init__(self, build: Callable[[str, Sequence[int]], Link], timeout_s: float):
        self._build, self._timeout_s = build, timeout_s
        self._links: dict[str, Link] = {}
        self._lock = threading.Lock()
        self._closed = False

    def build_in_background(self, name: str, replicas: Sequence[int], obsolete: Callable[[], bool], ready: Callable[[], None]) -> None:
        def run() -> None:
            try:
                link = self._build(name, replicas)
                link.warm(obsolete)
            except (LinkBroken, DeadlineExceeded, RuntimeError):
                return  # no acknowledgement: the coordinator never names this link; a death or deadline is reported elsewhere
            with self._lock:
                if not self._closed:
                    self._links[name] = link
            if self._closed:
                link.drop()  # this rank left its replica while the link was being built
            else:
                ready()

        threading.Thread(target=run, name=f"link-{name}", daemon=True).start()

    def use(self, name: str, replicas: Sequence[int], stop: Callable[[], bool]) -> Link:
        """The link of a view: built already, or formed now. Those of earlier views are dropped. Raises LinkBroken."""
        with self._lock:
            link = self._links.get(name)
        if link is None:
            link = interruptible(lambda: self._build(name, replicas), stop, self._timeout_s, f"link {name}")
        with self._lock:
            self._links[name] = link
            for other in [n for n in self._links if n != name]:
                if not self._building_after(other, name):
                    self._links.pop(other).drop()
        return link

    @staticmethod
    def _building_after(other: str, name: str) -> bool:
        """Link numbers grow; a link with a higher number than the one in use is being prepared, not left over."""
        return int(other.rsplit("#", 1)[1]) > int(name.rsplit("#", 1)[1])

    def drop_all(self) -> None:
        with self._lock:
            self._closed = True
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.drop()
