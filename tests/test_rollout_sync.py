"""Weights that an engine copies from the source's device memory: what is said of it, and the copy."""

from __future__ import annotations

import json
import multiprocessing as mp
import queue
import threading
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from everstep.errors import LinkBroken
from everstep.recovery.digest import digest_of
from everstep.rl.rollout import sync

SAID = (torch.Tensor, torch.Size([4, 6]), (6, 1), 24, torch.storage.TypedStorage, torch.bfloat16, 3, b"\x00memory\xff", 4096, 512, False,
        b"counter", 2, b"event\x80", True)  # fmt: skip


def test_a_handle_of_device_memory_travels_as_json(monkeypatch) -> None:
    told = json.loads(json.dumps(sync.plain(SAID)))
    got: dict[str, Any] = {}
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda **arguments: got.update(arguments) or torch.zeros(4, 6, dtype=torch.bfloat16))
    said = {"shown": [{"name": "w", "shape": [4, 6], "dtype": "bfloat16", "handle": told}], "digest": 0}
    assert sync._copied(said, torch.device("cuda", 1)) is not None
    with pytest.raises(LinkBroken, match="weights w to w arrived damaged"):
        sync._copied(said | {"digest": 1}, torch.device("cuda", 1))
    want = dict(zip(sync._ARGUMENTS, SAID, strict=True)) | {"storage_device": 1, "tensor_size": [4, 6], "tensor_stride": [6, 1]}
    assert got == want, "the device has another number here"


def _copy(said: dict[str, Any], answer: Any) -> None:
    copies = sync._copied(said, torch.device("cuda", 0))
    answer.send(None if copies is None else [copy.float().cpu().tolist() for copy in copies])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_another_process_copies_tensors_out_of_our_device_memory(dtype: torch.dtype) -> None:
    numbers = torch.arange(4096, device="cuda").to(dtype).view(64, 64)
    whole = [numbers[8:16].contiguous(), numbers[32:]]  # the other one in the middle of a larger allocation
    shown = [{"name": "w", "shape": list(t.shape), "dtype": str(dtype).removeprefix("torch."), "handle": sync._handle(t)} for t in whole]
    said = {"shown": shown, "digest": digest_of(whole)}
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_copy, args=(json.loads(json.dumps(said)), theirs), daemon=True)
    process.start()
    try:
        assert ours.poll(120) and ours.recv() == [t.float().cpu().tolist() for t in whole]
    finally:
        process.join(30)


class Line:
    """One end of a stream to a receiver of this process."""

    def __init__(self, out: queue.Queue[bytes], into: queue.Queue[bytes]):
        self._out, self._in, self._got = out, into, b""

    def send(self, data: memoryview) -> None:
        self._out.put(bytes(data))

    def receive_into(self, data: memoryview) -> None:
        while len(self._got) < len(data):
            self._got += self._in.get(timeout=20)
        data[:], self._got = self._got[: len(data)], self._got[len(data) :]


@pytest.mark.parametrize("reached", [True, False])
def test_weights_are_shown_in_buckets_and_come_as_bytes_if_they_cannot_be_copied(monkeypatch: pytest.MonkeyPatch, reached: bool) -> None:
    """With tensors that pretend to be in a device's memory; one engine is on another machine."""
    weights = [(f"w{i}", torch.arange(i * 10.0, i * 10 + 10).view(2, 5)) for i in range(7)]
    held = dict(weights)
    monkeypatch.setattr(sync, "_BUCKET_BYTES", 100)  # three of them
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(sync, "on_host", lambda tensors: [memoryview(t.numpy()).cast("B") for t in tensors.values()])
    monkeypatch.setattr(sync, "_handle", lambda whole: next(name for name, tensor in weights if torch.equal(tensor, whole)))
    buckets = []

    def copied(said: dict[str, Any], device: torch.device) -> list[torch.Tensor] | None:
        buckets.append([what["handle"] for what in said["shown"]])
        assert digest_of(held[name] for name in buckets[-1]) == said["digest"]
        return [held[name].clone() for name in buckets[-1]] if reached else None

    monkeypatch.setattr(sync, "_copied", copied)
    got: dict[str, dict[str, torch.Tensor]] = {}
    ends, threads = {}, []
    for engine, device in (("here", torch.device("cuda", 0)), ("there", None)):
        there, back = queue.Queue[bytes](), queue.Queue[bytes]()
        ends[engine] = Line(there, back)
        take = lambda engine, line, device: got.update({engine: dict(sync.receive(line, 4, device))})
        threads.append(threading.Thread(target=take, args=(engine, Line(back, there), device)))
        threads[-1].start()
    nbytes, failed = sync.send(ends, weights, 4)
    for thread in threads:
        thread.join(20)
    assert not failed and nbytes == 7 * 40
    assert buckets == ([["w0", "w1", "w2"], ["w3", "w4", "w5"], ["w6"]] if reached else [["w0", "w1", "w2"]])
    for engine in ends:
        assert list(got[engine]) == list(held) and all(torch.equal(got[engine][name], held[name]) for name in held), engine
