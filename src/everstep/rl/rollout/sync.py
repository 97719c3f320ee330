"""Weights from the trainer's ranks to rollout engines: by Hugging Face names, streamed tensor by tensor, to all engines at once.

    source (collecting rank of a replica)            engine
    for each weight: header, chunks with checksums   copies each into its model; has no version meanwhile
    the end: how many there were                     complete and in order: it has the version now

The connections are those of a heal (:mod:`everstep.recovery.heal`). An engine that is gone is left out, the others go on; if the source
is gone, engines have no version and get everything again from somebody else. Nothing is served by half of either.

Where both have a GPU on one machine, the source's device has a window: memory that engines open once (CUDA's inter-process handles), through which
bucket after bucket goes to their own, with a digest made on the device in the place of a checksum. It stays for the life of the process, for what
is shown to a process that dies cannot be freed. The bytes go through host memory where that is not so, or does not work.

With LoRA an engine gets the frozen weights once (``kind="base"``), and from then on adapters only.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import reductions

from everstep.errors import DeadlineExceeded, EverstepError, LinkBroken, first_line
from everstep.recovery.digest import digest_of
from everstep.recovery.heal import HealStream, on_host, receive_checked, receive_mark, send_checked

LOG = logging.getLogger(__name__)
Kind = Literal["full", "base", "adapter"]
_WINDOW_BYTES = 64 << 20  # a bucket: it costs both sides a wait for the device, and an answer
_ALIGNED = 256  # where a tensor begins in it
_TAKEN, _CANNOT = bytearray(b"\1"), bytearray(b"\0")
_ARGUMENTS = tuple(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
_OF_BYTES = frozenset({"storage_handle", "ref_counter_handle", "event_handle"})  # what CUDA calls its memory, counter and event by
_OF_NUMBERS = frozenset({"tensor_size", "tensor_stride", "tensor_offset", "storage_size_bytes", "storage_offset_bytes", "ref_counter_offset", "event_sync_required"})


@dataclass(frozen=True)
class _Window:
    """``memory``: uint8, on the source's device. ``handle``: what another process of this machine needs to open it. ``pool``: that it is of."""

    memory: Tensor
    handle: dict[str, Any]
    pool: Any = None


@dataclass
class _End:
    """The source's end of a stream. ``direct``: the engine has opened our window."""

    stream: HealStream
    direct: bool

    def say(self, version: int, data: memoryview) -> None:
        send_checked(self.stream, data, version)

    def taken(self) -> bool:
        answer = bytearray(1)
        self.stream.receive_into(memoryview(answer))
        return answer == _TAKEN


def send(
    streams: Mapping[str, HealStream], weights: Iterable[tuple[str, Tensor]], version: int, device: torch.device | None = None
) -> tuple[int, dict[str, str]]:
    """Stream ``weights``, which are on ``device`` (the CPU), to all. Returns bytes sent to each, and engine -> why it did not get all of them."""
    ends = {name: _End(stream, False) for name, stream in streams.items()}
    failed, nbytes, count = dict[str, str](), 0, 0
    window = _window(device) if device is not None and device.type == "cuda" and streams else None

    def each(names: Iterable[str], act: Callable[..., object], *args: Any) -> None:
        for name in [name for name in names if name in ends]:
            try:
                act(ends[name], *args)
            except (LinkBroken, DeadlineExceeded) as error:
                failed[name] = str(error)
                del ends[name]

    def show(bucket: list[tuple[dict[str, Any], Tensor]]) -> None:
        assert window is not None
        places = _places(piece.numel() for _, piece in bucket)
        for place, (_, piece) in zip(places, bucket, strict=True):
            window.memory[place : place + piece.numel()].copy_(piece)
        about = [what | {"nbytes": piece.numel()} for what, piece in bucket]
        direct = [engine for engine, end in ends.items() if end.direct]
        each(direct, _End.say, version, _text({"shown": about, "digest": digest_of([window.memory[: _extent(about)]])}))
        each(direct, _take)

    each(streams, _greet, version, window)
    bucket: list[tuple[dict[str, Any], Tensor]] = []
    used = 0  # bytes of the window
    for name, tensor in weights:  # to the end, also if nobody listens any more: it is a collective
        count += 1
        if not ends:
            continue
        whole = tensor.detach().contiguous()
        nbytes += whole.nbytes
        about = {"name": name, "shape": list(whole.shape), "dtype": _name_of(whole.dtype)}
        if any(end.direct for end in ends.values()):
            for at, piece in _pieces(whole):
                if bucket and used + piece.numel() > _WINDOW_BYTES:
                    show(bucket)
                    bucket, used = [], 0
                bucket.append((about | {"at": at}, piece))
                used += _room(piece.numel())
        by_bytes = [engine for engine, end in ends.items() if not end.direct]
        if by_bytes and whole.is_cuda:
            torch.cuda.current_stream(whole.device).synchronize()  # on_host copies on a stream of its own
        each(by_bytes, _End.say, version, _text(about))
        for chunk in on_host({name: whole}) if by_bytes else ():
            each(by_bytes, _End.say, version, chunk)
    if bucket:
        show(bucket)
    each(streams, _End.say, version, _text({"count": count}))
    return nbytes, failed


def receive(stream: HealStream, version: int, device: torch.device | None = None) -> Iterator[tuple[str, Tensor]]:
    """The weights in the order in which they are sent. LinkBroken if the source is gone, or what comes is damaged, of another version, or
    not all. ``device``: a CUDA device to which they are copied straight from the source's, if that is on the same machine; else they
    are on the CPU."""
    _End(stream, False).say(version, _text({"machine": _machine() if device is not None and device.type == "cuda" else ""}))
    count, window, begun = 0, torch.zeros(0), dict[str, Tensor]()
    while True:
        said = _hear(stream, version)
        if "count" in said:
            if said["count"] != count:
                raise LinkBroken(f"{count} weights came where {said['count']} were sent")
            return
        if "window" in said:
            assert device is not None
            opened = _opened(said["window"], device)
            stream.send(memoryview(_CANNOT if opened is None else _TAKEN))
            window = window if opened is None else opened
            continue
        if "shown" in said:
            assert device is not None
            complete = _copied(said, window, begun, device)
            stream.send(memoryview(_TAKEN))
            yield from complete
            count += len(complete)
            continue
        tensor = torch.empty(said["shape"], dtype=getattr(torch, said["dtype"]), device="cpu")
        for chunk in on_host({said["name"]: tensor}):
            size, digest = receive_mark(stream, version)
            receive_checked(stream, [chunk], size, digest)
        yield said["name"], tensor
        count += 1


def _pieces(whole: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(where it begins, its bytes) of parts that fit into the window."""
    flat = whole.view(-1).view(torch.uint8)
    for at in range(0, max(1, flat.numel()), _WINDOW_BYTES):
        yield at, flat[at : at + _WINDOW_BYTES]


def _places(sizes: Iterable[int]) -> list[int]:
    """Where pieces of these sizes begin in the window, one after the other."""
    places, following = list[int](), 0
    for size in sizes:
        places.append(following)
        following += _room(size)
    return places


def _room(size: int) -> int:
    """Bytes of the window that a piece takes."""
    return -(-size // _ALIGNED) * _ALIGNED


def _text(said: Mapping[str, Any]) -> memoryview:
    return memoryview(json.dumps(said).encode())


def _hear(stream: HealStream, version: int) -> dict[str, Any]:
    size, digest = receive_mark(stream, version)
    said = bytearray(size)
    receive_checked(stream, [memoryview(said)], size, digest)
    heard: dict[str, Any] = json.loads(bytes(said))
    return heard


def _greet(end: _End, version: int, window: _Window | None) -> None:
    near = _hear(end.stream, version)["machine"] == _machine()
    if near and window is not None:
        end.say(version, _text({"window": window.handle}))
        end.direct = end.taken()


def _take(end: _End) -> None:
    if not end.taken():
        raise LinkBroken("the engine did not take what it was shown")


_WINDOWS: dict[torch.device, _Window] = {}


def _window(device: torch.device) -> _Window | None:
    """This process's window on ``device``; None where memory cannot be shared, or there is none now."""
    if device not in _WINDOWS:
        try:
            pool = torch.cuda.MemPool()  # a segment of its own: whoever opens it has all of a segment, and it stays for good
            with torch.cuda.use_mem_pool(pool, device):
                memory = torch.empty(_WINDOW_BYTES, dtype=torch.uint8, device=device)
            _, arguments = reductions.reduce_tensor(memory)
            _WINDOWS[device] = _Window(memory, plain(arguments), pool)
        except RuntimeError as error:
            LOG.warning("weights go through host memory: this device's memory cannot be shared (%s)", first_line(error))
            return None
    return _WINDOWS[device]


def plain(arguments: Sequence[Any]) -> dict[str, Any]:
    """torch's ``arguments`` for ``rebuild_cuda_tensor`` as what JSON can say: those that differ from tensor to tensor."""
    named = dict(zip(_ARGUMENTS, arguments, strict=True))
    return {name: named[name].hex() for name in _OF_BYTES} | {name: list(v) if isinstance(v := named[name], tuple) else v for name in _OF_NUMBERS}


def rebuilding(said: Mapping[str, Any], dtype: torch.dtype, device: int) -> dict[str, Any]:
    """What :func:`plain` said as arguments again, in a process that knows the device by another number."""
    fixed = {"tensor_cls": Tensor, "storage_cls": torch.storage.TypedStorage, "dtype": dtype, "storage_device": device, "requires_grad": False}
    given = {name: bytes.fromhex(said[name]) for name in _OF_BYTES} | {name: said[name] for name in _OF_NUMBERS}
    # Its event would be opened each time, and never closed; the source waits for its device before it says what the window shows.
    return fixed | given | {"event_sync_required": False}


def _opened(handle: Mapping[str, Any], device: torch.device) -> Tensor | None:
    """The source's window; None if it cannot be reached."""
    try:
        window: Tensor = reductions.rebuild_cuda_tensor(**rebuilding(handle, torch.uint8, device.index or 0))
        return window
    except RuntimeError as error:
        LOG.warning("weights come through host memory: the source's device memory cannot be reached (%s)", first_line(error))
        return None


def _copied(said: Mapping[str, Any], window: Tensor, begun: dict[str, Tensor], device: torch.device) -> list[tuple[str, Tensor]]:
    """Copy what the window shows to our ``device``; returns the tensors that are complete. ``begun``: those that are not. LinkBroken if it is
    something else than what was shown."""
    shown, complete = said["shown"], list[tuple[str, Tensor]]()
    mine = window[: _extent(shown)].to(device, copy=True)
    if digest_of([mine]) != said["digest"]:  # of the bucket as it lies there: of each of its pieces it would take the device a dozen kernels
        raise LinkBroken(f"weights {shown[0]['name']} to {shown[-1]['name']} arrived damaged: their digest is wrong")
    for what, place in zip(shown, _places(what["nbytes"] for what in shown), strict=True):
        name, at, shape, dtype = what["name"], what["at"], what["shape"], getattr(torch, what["dtype"])
        part = mine[place : place + what["nbytes"]]
        if part.numel() == math.prod(shape) * dtype.itemsize:
            complete.append((name, part.view(dtype).view(shape)))  # of the bucket's memory: a copy of its own would cost a kernel for each
            continue
        if at == 0:
            begun[name] = torch.empty(shape, dtype=dtype, device=device)
        flat = begun[name].view(-1).view(torch.uint8)
        flat[at : at + part.numel()].copy_(part)
        if at + part.numel() == flat.numel():
            complete.append((name, begun.pop(name)))
    return complete


def _extent(shown: Sequence[Mapping[str, Any]]) -> int:
    """Bytes of the window that a bucket takes, what lies between its pieces included."""
    return sum(_room(what["nbytes"]) for what in shown)


def _machine() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def serve(
    streams: Mapping[str, str], store: dist.Store, timeout_s: float, host: str, weights: Iterable[tuple[str, Tensor]], version: int,
    device: torch.device | None = None,
) -> dict[str, str]:
    """Send ``weights``, which are on ``device``, to every engine that joins its stream (engine -> stream). Returns engine -> why it did not get
    all. Whoever has not come in half of ``timeout_s`` makes nobody miss it but itself: the engines' clocks run since before ours."""
    missed, served = dict[str, str](), dict[str, HealStream]()
    ends = {engine: stream(name, store, timeout_s) for engine, name in streams.items()}

    def meet(engine: str) -> None:
        try:
            served[engine] = ends[engine].serve(host, within_s=timeout_s / 2)
        except Exception as error:  # the end of a thread: whatever it is, this engine gets nothing, and the others do
            missed[engine] = str(error) if isinstance(error, EverstepError) else f"{type(error).__name__}: {error}"

    others = [threading.Thread(target=meet, args=(engine,), name=f"meet-{engine}") for engine in streams]
    with contextlib.ExitStack() as closing:
        for end in ends.values():
            closing.enter_context(end)
        for thread in others:
            thread.start()
        for thread in others:
            thread.join()  # each has a deadline
        _, failed = send(served, weights, version, device)
    return missed | failed


def stream(name: str, store: dist.Store, timeout_s: float) -> HealStream:
    """One end of the connection for a transfer. LinkBroken, once it is called off."""
    return HealStream(name, store, timeout_s, lambda: store.check([off_key(name)]), "rollout.sync_timeout_s")


def off_key(name: str) -> str:
    """The store's key that says that a transfer is called off."""
    return f"{name}/off"


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
