"""Links: the communicators between the ranks of one position in different replicas.

At any time a rank may hold several: the one in use, the standbys for those who would survive the death of one member, and one that
is being built for a joiner. All but the one in use are silent.

A link is a raw c10d process group outside any ``torch.distributed`` world, so that it can be dropped and formed anew while the
replicas' own worlds live on. Nothing here blocks without looking at ``stop``: a work handle is polled together with the view,
because a collective whose peer died may never return (NCCL) or return only to the ring neighbours (gloo).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions

from everstep.errors import DeadlineExceeded, LinkBroken
from everstep.node.page import for_others, leave_out, noted
from everstep.recovery.view import Record

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

    sent_bytes = 0  # by this rank, as the bandwidth-optimal algorithm of each collective would

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
            try:
                self._group.eager_connect_single_device(device)
            except BaseException:  # a communicator that is half made spins on the device
                self.drop()
                raise
        else:
            self._group = dist.ProcessGroupGloo(prefixed, rank, size, timedelta(seconds=timeout_s))

    def warm(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Connect everybody now rather than in the first reduce."""
        self.sum([torch.ones(8, device=self._device)], stop, self._timeout_s)

    @noted("sum")
    def sum(
        self, tensors: Sequence[torch.Tensor], stop: Callable[[], bool], timeout_s: float, issued: Callable[[], None] = lambda: None,
        in_place: bool = False,
    ) -> list[torch.Tensor]:
        """Sums over the members, out of place (a broken reduce destroys nothing) unless asked otherwise. Bitwise equal on all members.

        Tensors of one dtype are flattened into buckets of ``BUCKET_BYTES``. ``issued`` is called once the collectives run. Raises
        LinkBroken if ``stop`` turns true or a member is gone, DeadlineExceeded after ``timeout_s``.
        """
        totals = [t.detach() if in_place else t.detach().clone() for t in tensors]
        if self._alone():
            issued()
            return totals
        end = time.monotonic() + timeout_s
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=timeout_s)  # gloo's default would be the deadline to form the group
        pending = []
        for bucket in _buckets(totals):
            flat = bucket[0].reshape(-1) if len(bucket) == 1 else torch.cat([t.reshape(-1) for t in bucket])
            self._count(2 * flat.nbytes)
            pending.append((self._start(lambda group, flat=flat: group.allreduce([flat], options), flat), flat, bucket))  # type: ignore[misc]
        issued()
        for work, flat, bucket in pending:
            self._finish(work, stop, end, timeout_s)
            if len(bucket) > 1:
                for total, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                    total.copy_(part.view_as(total))
        self._held.clear()
        return totals

    def gather(self, row: torch.Tensor, stop: Callable[[], bool], timeout_s: float) -> list[torch.Tensor]:
        """Every member's row, as ``gather_rows``, on the CPU."""
        return [r.cpu() for r in self.gather_rows(row, stop, timeout_s)]

    @noted("gather")
    def gather_rows(self, row: torch.Tensor, stop: Callable[[], bool], timeout_s: float) -> list[torch.Tensor]:
        """Every member's row (1-D, of the same length everywhere), in the order of ``replicas``. Raises like sum()."""
        if self._alone():
            return [row]
        end = time.monotonic() + timeout_s
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=timeout_s)
        mine = row.to(self._device)
        rows = [torch.empty_like(mine) for _ in self.replicas]
        self._count(mine.nbytes * len(self.replicas))
        work = self._start(lambda group: group.allgather([rows], [mine], options), mine, rows)
        self._finish(work, stop, end, timeout_s)
        self._held.clear()
        return rows

    @noted("exchange")
    def exchange(self, parts: torch.Tensor, stop: Callable[[], bool], timeout_s: float) -> torch.Tensor:
        """``parts[i]`` goes to member i; returns what each member sent me, of the same shape. Raises like sum()."""
        if self._alone():
            return parts
        end = time.monotonic() + timeout_s
        options = AllToAllOptions()
        options.timeout = timedelta(seconds=timeout_s)
        mine, got = parts.contiguous(), torch.empty_like(parts)
        self._count(mine.nbytes)
        work = self._start(lambda group: group.alltoall_base(got, mine, [], [], options), mine, got)
        self._finish(work, stop, end, timeout_s)
        self._held.clear()
        return got

    @noted("fold")
    def fold(
        self, like: Sequence[torch.Tensor], owners: Mapping[int, int], mine: Mapping[int, Sequence[torch.Tensor]], stop: Callable[[], bool],
        timeout_s: float, issued: Callable[[], None] = lambda: None,
    ) -> list[torch.Tensor]:
        """Sums over slots, one after the other in the order of their numbers, each sent by its owner: bitwise the same whoever owns
        which slot. Out of place.

        Args:
            like: tensors of the shapes and dtype of one slot's.
            owners: slot -> the member (index in ``replicas``) that holds it, in the order of their numbers.
            mine: slot -> its tensors, for those that I own.
        """
        totals = [torch.zeros_like(t) for t in like]
        alone, end = self._alone(), time.monotonic() + timeout_s
        started = False
        for index, total in enumerate(totals):
            for part in _ranges(total):
                window = total.view(-1)[part]
                pieces, works = [], []
                for slot, owner in owners.items():
                    piece = mine[slot][index].reshape(-1)[part] if slot in mine else torch.empty_like(window)
                    pieces.append(piece)
                    if not alone:
                        works.append(self._broadcast(piece, owner, timeout_s))
                if not started:
                    issued()
                    started = True
                for work in works:
                    self._finish(work, stop, end, timeout_s)
                self._held.clear()
                for piece in pieces:
                    window += piece
        return totals

    def _broadcast(self, piece: torch.Tensor, root: int, timeout_s: float) -> Any:
        self._count(piece.nbytes)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = root, 0, timedelta(seconds=timeout_s)
        return self._start(lambda group: group.broadcast([piece], options), piece)

    def _count(self, nbytes: int) -> None:
        """``nbytes`` of a message of which each member sends all but its own part."""
        self.sent_bytes += nbytes * (len(self.replicas) - 1) // len(self.replicas)

    def _alone(self) -> bool:
        """A single survivor. Raises LinkBroken if the link was dropped."""
        if self._group is None and len(self.replicas) > 1:
            raise LinkBroken(f"link {self.name} was dropped")
        return self._group is None

    def _start(self, collective: Callable[[Any], Any], *buffers: Any) -> Any:
        self._held += buffers
        try:
            return collective(self._group)
        except RuntimeError as error:
            raise LinkBroken(f"link {self.name}: {error}") from error

    def _finish(self, work: Any, stop: Callable[[], bool], end: float, timeout_s: float) -> None:
        while not work.is_completed():
            if stop():
                raise LinkBroken(f"link {self.name} was overtaken by a newer view")
            if time.monotonic() > end:
                raise DeadlineExceeded(
                    f"link {self.name}: a reduce took longer than {timeout_s:g} s (recovery.step_timeout_s and recovery.progress_timeout_s)"
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


def _ranges(tensor: torch.Tensor) -> Iterator[slice]:
    """Elements of a flattened tensor, in windows of BUCKET_BYTES."""
    step = BUCKET_BYTES // tensor.element_size()
    for start in range(0, tensor.numel(), step):
        yield slice(start, min(start + step, tensor.numel()))


def interruptible(build: Callable[[], Link], stop: Callable[[], bool], timeout_s: float, what: str) -> Link:
    """``build()`` in a thread of its own, given up when ``stop`` turns true: a group's constructor waits for members that may
    be dead by now. What is built after that is dropped. Raises LinkBroken."""
    result: list[Link] = []
    failure: list[BaseException] = []
    lock, given_up = threading.Lock(), threading.Event()

    def run() -> None:
        try:
            link = build()
        except (RuntimeError, ValueError) as error:  # what c10d raises when the others do not come
            failure.append(error)
            return
        with lock:
            if not given_up.is_set():
                result.append(link)
                return
        link.drop()

    thread = threading.Thread(target=run, name=f"build {what}", daemon=True)
    thread.start()
    end = time.monotonic() + timeout_s
    try:
        while thread.is_alive():
            if stop():
                raise LinkBroken(f"{what} was overtaken by a newer view while it was being formed")
            if time.monotonic() > end:
                raise LinkBroken(f"{what} was not formed in {timeout_s:g} s")
            thread.join(0.001)
    except BaseException:  # whatever ends the wait: what is built afterwards is dropped
        with lock:
            given_up.set()
            for link in result:
                link.drop()
        raise
    if failure:
        raise LinkBroken(f"{what} could not be formed: {failure[0]}") from failure[0]
    return result[0]


class Links:
    """The links of one rank, by name: the one in use, standbys, and one that is being built in the background."""

    def __init__(self, build: Callable[[str, Sequence[int]], Link], timeout_s: float):
        self._build, self._timeout_s = build, timeout_s
        self._links: dict[str, tuple[int, Link]] = {}  # with the number of the record that named it
        self._lock = threading.Lock()
        self._closed = False
        self._sent_bytes = 0  # over links that were dropped

    @property
    def sent_bytes(self) -> int:
        """Sent by this rank so far, over all its links."""
        with self._lock:
            return self._sent_bytes + sum(link.sent_bytes for _, link in self._links.values())

    def build_in_background(self, record: Record, obsolete: Callable[[], bool], ready: Callable[[], None]) -> None:
        """Build the link that a record of kind BUILD orders; ``ready`` is called once it is warm."""
        name, replicas = record.view.link_id, record.view.replicas

        def run() -> None:
            leave_out()
            link: Link | None = None
            try:
                link = self._build(name, replicas)
                link.warm(obsolete)
            except (LinkBroken, DeadlineExceeded, RuntimeError):
                # No acknowledgement: the coordinator never names this link; a death or deadline is reported elsewhere.
                if link is not None:
                    link.drop()  # else its communicator stays, and on a GPU its kernel spins
                return
            with self._lock:
                if not self._closed:
                    self._links[name] = record.number, link
            if self._closed:
                link.drop()  # this rank left its replica while the link was being built
            else:
                ready()

        threading.Thread(target=run, name=f"link-{name}", daemon=True).start()

    def use(self, record: Record, stop: Callable[[], bool]) -> tuple[Link, bool]:
        """(the link of a view, whether it was built already); formed now if it was not. Links that the view does not keep and that
        were not ordered later are dropped. Raises LinkBroken."""
        view = record.view
        with self._lock:
            _, link = self._links.get(view.link_id, (0, None))
        built = link is not None
        if link is None:
            link = self._form(view.link_id, view.replicas, stop)
        with self._lock:
            self._links[view.link_id] = record.number, link
            kept = {view.link_id, *view.links}
            for name in [n for n, (number, _) in self._links.items() if n not in kept and number < record.number]:
                dropped = self._links.pop(name)[1]
                self._sent_bytes += dropped.sent_bytes
                dropped.drop()
        return link, built

    def beside(self, record: Record, stop: Callable[[], bool]) -> Link:
        """A second link of a view's members, for one step, dropped with the next one's use. Raises LinkBroken."""
        name = f"{record.view.link_id}/{record.view.committed + 1}"
        link = self._form(name, record.view.replicas, stop)
        with self._lock:
            if not self._closed:
                self._links[name] = record.number, link
                return link
        link.drop()
        raise LinkBroken(f"{name} was formed after this rank had left its replica")

    def _form(self, name: str, replicas: Sequence[int], stop: Callable[[], bool]) -> Link:
        with for_others():
            return interruptible(lambda: self._build(name, replicas), stop, self._timeout_s, f"link {name}")

    def drop_all(self) -> None:
        with self._lock:
            self._closed = True
            links, self._links = [link for _, link in self._links.values()], {}
        for link in links:
            link.drop()
