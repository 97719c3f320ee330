"""Weights from the trainer's ranks to rollout engines: by Hugging Face names, streamed tensor by tensor, to all engines at once.

    source (collecting rank of a replica)            engine
    for each weight: header, chunks with checksums   copies each into its model; has no version meanwhile
    the end: how many there were                     complete and in order: it has the version now

The connections are those of a heal (:mod:`everstep.recovery.heal`). An engine that is gone is left out, the others go on; if the source
is gone, engines have no version and get everything again from somebody else. Nothing is served by half of either.

Where both have a GPU on one machine, an engine is shown a bucket of weights in the source's device memory (CUDA's inter-process handles) and
copies them to its own, with a digest made on the device in the place of a checksum; the bytes go through host memory, one weight after the other,
where that is not so, or does not work.

With LoRA an engine gets the frozen weights once (``kind="base"``), and from then on adapters only.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
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
_BUCKET_BYTES = 256 << 20  # shown together: each bucket costs both sides a wait for the device, and an answer
_TAKEN, _CANNOT = bytearray(b"\1"), bytearray(b"\0")
_ARGUMENTS = tuple(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
_OF_BYTES = frozenset({"storage_handle", "ref_counter_handle", "event_handle"})  # what CUDA calls its memory, counter and event by
_OF_NUMBERS = frozenset({"tensor_size", "tensor_stride", "tensor_offset", "storage_size_bytes", "storage_offset_bytes", "ref_counter_offset", "event_sync_required"})


@dataclass
class _End:
    """The source's end of a stream. ``direct``: the engine reads our device's memory itself."""

    stream: HealStream
    direct: bool

    def say(self, version: int, data: memoryview) -> None:
        send_checked(self.stream, data, version)

    def taken(self) -> bool:
        """Whether the engine has copied what it was shown; if not, it cannot, and gets this and all that follows as bytes."""
        answer = bytearray(1)
        self.stream.receive_into(memoryview(answer))
        self.direct = answer == _TAKEN
        return self.direct


def send(streams: Mapping[str, HealStream], weights: Iterable[tuple[str, Tensor]], version: int) -> tuple[int, dict[str, str]]:
    """Stream ``weights`` to all. Returns bytes sent to each, and engine -> why it did not get all of them."""
    ends = {name: _End(stream, False) for name, stream in streams.items()}
    failed, nbytes, count = dict[str, str](), 0, 0

    def each(names: Iterable[str], act: Callable[..., object], *args: Any) -> None:
        for name in [name for name in names if name in ends]:
            try:
                act(ends[name], *args)
            except (LinkBroken, DeadlineExceeded) as error:
                failed[name] = str(error)
                del ends[name]

    each(streams, _greet, version)
    for bucket in _buckets(weights):  # to the end, also if nobody listens any more: it is a collective
        count += len(bucket)
        nbytes += sum(whole.nbytes for _, whole in bucket) if ends else 0
        about = [{"name": name, "shape": list(whole.shape), "dtype": _name_of(whole.dtype)} for name, whole in bucket]
        shown = [engine for engine, end in ends.items() if end.direct and all(whole.is_cuda for _, whole in bucket)]
        if shown:
            handles = [what | {"handle": _handle(whole)} for what, (_, whole) in zip(about, bucket, strict=True)]
            each(shown, _End.say, version, _text({"shown": handles, "digest": digest_of(whole for _, whole in bucket)}))
            each(shown, _End.taken)
        by_bytes = [engine for engine, end in ends.items() if engine not in shown or not end.direct]
        for what, (name, whole) in zip(about, bucket, strict=True):
            each(by_bytes, _End.say, version, _text(what))
            for chunk in on_host({name: whole}) if by_bytes else ():
                each(by_bytes, _End.say, version, chunk)
    each(streams, _End.say, version, _text({"count": count}))
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()  # what engines that died had not given back
    return nbytes, failed


def _buckets(weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """All of ``weights`` in their order, each contiguous; in device memory several at a time, elsewhere one."""
    bucket: list[tuple[str, Tensor]] = []
    nbytes = 0
    for name, tensor in weights:
        bucket.append((name, tensor.detach().contiguous()))
        nbytes += tensor.nbytes
        if not tensor.is_cuda or nbytes >= _BUCKET_BYTES:
            yield bucket
            bucket, nbytes = [], 0
    if bucket:
        yield bucket


def receive(stream: HealStream, version: int, device: torch.device | None = None) -> Iterator[tuple[str, Tensor]]:
    """The weights in the order in which they are sent. LinkBroken if the source is gone, or what comes is damaged, of another version, or
    not all. ``device``: a CUDA device to which they are copied straight from the source's, if that is on the same machine; else they
    are on the CPU."""
    _End(stream, False).say(version, _text({"machine": _machine() if device is not None and device.type == "cuda" else ""}))
    count = 0
    while True:
        said = _hear(stream, version)
        if "count" in said:
            if said["count"] != count:
                raise LinkBroken(f"{count} weights came where {said['count']} were sent")
            return
        if "shown" in said:
            assert device is not None
            copies = _copied(said, device)
            stream.send(memoryview(_CANNOT if copies is None else _TAKEN))
            for what, copy in zip(said["shown"], copies or (), strict=False):  # those that cannot be copied come again, as bytes
                yield what["name"], copy
                count += 1
            continue
        tensor = torch.empty(said["shape"], dtype=getattr(torch, said["dtype"]), device="cpu")
        for chunk in on_host({said["name"]: tensor}):
            size, digest = receive_mark(stream, version)
            receive_checked(stream, [chunk], size, digest)
        yield said["name"], tensor
        count += 1


def _text(said: Mapping[str, Any]) -> memoryview:
    return memoryview(json.dumps(said).encode())


def _hear(stream: HealStream, version: int) -> dict[str, Any]:
    size, digest = receive_mark(stream, version)
    said = bytearray(size)
    receive_checked(stream, [memoryview(said)], size, digest)
    heard: dict[str, Any] = json.loads(bytes(said))
    return heard


def _greet(end: _End, version: int) -> None:
    end.direct = _hear(end.stream, version)["machine"] == _machine()


def _handle(whole: Tensor) -> dict[str, Any]:
    """What another process of this machine needs to read a tensor in our device's memory."""
    _, arguments = reductions.reduce_tensor(whole)
    return plain(arguments)


def plain(arguments: Sequence[Any]) -> dict[str, Any]:
    """torch's ``arguments`` for ``rebuild_cuda_tensor`` as what JSON can say: those that differ from tensor to tensor."""
    named = dict(zip(_ARGUMENTS, arguments, strict=True))
    return {name: named[name].hex() for name in _OF_BYTES} | {name: list(v) if isinstance(v := named[name], tuple) else v for name in _OF_NUMBERS}


def rebuilding(said: Mapping[str, Any], dtype: torch.dtype, device: int) -> dict[str, Any]:
    """What :func:`plain` said as arguments again, in a process that knows the device by another number."""
    fixed = {"tensor_cls": Tensor, "storage_cls": torch.storage.TypedStorage, "dtype": dtype, "storage_device": device, "requires_grad": False}
    return fixed | {name: bytes.fromhex(said[name]) for name in _OF_BYTES} | {name: said[name] for name in _OF_NUMBERS}


def _copied(said: Mapping[str, Any], device: torch.device) -> list[Tensor] | None:
    """Copies, on our device, of the tensors of a bucket in the source's device memory; None if they cannot be reached. LinkBroken if they are
    others."""
    copies: list[Tensor] = []
    try:
        for what in said["shown"]:
            arguments = rebuilding(what["handle"], getattr(torch, what["dtype"]), device.index or 0)
            copies.append(reductions.rebuild_cuda_tensor(**arguments).clone())
    except RuntimeError as error:
        LOG.warning("weights come through host memory: the source's device memory cannot be reached (%s)", first_line(error))
        return None
    if any(list(copy.shape) != what["shape"] for copy, what in zip(copies, said["shown"], strict=True)) or digest_of(copies) != said["digest"]:
        names = [what["name"] for what in said["shown"]]
        raise LinkBroken(f"weights {names[0]} to {names[-1]} arrived damaged: their digest is wrong")
    return copies


def _machine() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def serve(
    streams: Mapping[str, str], store: dist.Store, timeout_s: float, host: str, weights: Iterable[tuple[str, Tensor]], version: int
) -> dict[str, str]:
    """Send ``weights`` to every engine that joins its stream (engine -> stream). Returns engine -> why it did not get all."""
    missed = dict[str, str]()
    with contextlib.ExitStack() as closing:
        served = dict[str, HealStream]()
        for engine, name in streams.items():
            end = closing.enter_context(stream(name, store, timeout_s))
            try:
                served[engine] = end.serve(host)
            except EverstepError as error:
                missed[engine] = str(error)
        _, failed = send(served, weights, version)
    return missed | failed


def stream(name: str, store: dist.Store, timeout_s: float) -> HealStream:
    """One end of the connection for a transfer. LinkBroken, once it is called off."""
    return HealStream(name, store, timeout_s, lambda: store.check([off_key(name)]))


def off_key(name: str) -> str:
    """The store's key that says that a transfer is called off."""
    return f"{name}/off"


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
