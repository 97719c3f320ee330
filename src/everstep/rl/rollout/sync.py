"""Weights from the trainer's ranks to rollout engines: by Hugging Face names, streamed tensor by tensor, to all engines at once.

    source (collecting rank of a replica)            engine
    for each weight: header, chunks with checksums   copies each into its model; has no version meanwhile
    the end: how many there were                     complete and in order: it has the version now

The connections are those of a heal (:mod:`everstep.recovery.heal`). An engine that is gone is left out, the others go on; if the source
is gone, engines have no version and get everything again from somebody else. Nothing is served by half of either.

With LoRA an engine gets the frozen weights once (``kind="base"``), and from then on adapters only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from everstep.errors import DeadlineExceeded, EverstepError, LinkBroken
from everstep.recovery.heal import MARK, HealStream, checksum_of, on_host, receive_checked, receive_mark

Kind = Literal["full", "base", "adapter"]


def send(streams: Mapping[str, HealStream], weights: Iterable[tuple[str, Tensor]], version: int) -> tuple[int, dict[str, str]]:
    """Stream ``weights`` to all. Returns bytes sent to each, and engine -> why it did not get all of them."""
    living, failed, nbytes, count = dict(streams), dict[str, str](), 0, 0

    def tell(data: memoryview) -> None:
        for name, stream in list(living.items()):
            try:
                stream.send(memoryview(MARK.pack(version, len(data), checksum_of(data))))
                stream.send(data)
            except (LinkBroken, DeadlineExceeded) as error:
                failed[name] = str(error)
                del living[name]

    for name, tensor in weights:  # to the end, also if nobody listens any more: it is a collective
        count += 1
        whole = tensor.detach().contiguous()
        tell(memoryview(json.dumps({"name": name, "shape": list(whole.shape), "dtype": _name_of(whole.dtype)}).encode()))
        for chunk in on_host({name: whole}):
            tell(chunk)
            nbytes += len(chunk)
    tell(memoryview(json.dumps({"count": count}).encode()))
    return nbytes, failed


def receive(stream: HealStream, version: int) -> Iterator[tuple[str, Tensor]]:
    """The weights in the order in which they are sent, on the CPU. LinkBroken if the source is gone, or what comes is damaged, of
    another version, or not all."""
    count = 0
    while True:
        size, digest = receive_mark(stream, version)
        header = bytearray(size)
        receive_checked(stream, [memoryview(header)], size, digest)
        said: dict[str, Any] = json.loads(bytes(header))
        if "count" in said:
            if said["count"] != count:
                raise LinkBroken(f"{count} weights came where {said['count']} were sent")
            return
        tensor = torch.empty(said["shape"], dtype=getattr(torch, said["dtype"]), device="cpu")
        for chunk in on_host({said["name"]: tensor}):
            size, digest = receive_mark(stream, version)
            receive_checked(stream, [chunk], size, digest)
        yield said["name"], tensor
        count += 1


def all_served(streams: Mapping[str, HealStream], host: str) -> tuple[dict[str, HealStream], dict[str, str]]:
    """The streams whose engine connected; and why the others are left out."""
    served, failed = dict[str, HealStream](), dict[str, str]()
    for name, stream in streams.items():
        try:
            served[name] = stream.serve(host)
        except EverstepError as error:
            stream.close()
            failed[name] = str(error)
    return served, failed


def stream(name: str, store: dist.Store, timeout_s: float) -> HealStream:
    """One end of the connection for a transfer. LinkBroken, once it is called off."""
    return HealStream(name, store, timeout_s, lambda: store.check([off_key(name)]))


def off_key(name: str) -> str:
    """The store's key that says that a transfer is called off."""
    return f"{name}/off"


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
