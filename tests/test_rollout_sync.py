"""Weights that an engine copies from the source's device memory: what is said of it, and the copy."""

from __future__ import annotations

import json
import multiprocessing as mp
import queue
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from everstep.errors import LinkBroken
from everstep.rl.rollout import sync

SAID = (torch.Tensor, torch.Size([4, 6]), (6, 1), 24, torch.storage.TypedStorage, torch.bfloat16, 3, b"\x00memory\xff", 4096, 512, False,
        b"counter", 2, b"event\x80", True)  # fmt: skip


def test_a_handle_of_device_memory_travels_as_json(monkeypatch) -> None:
    told = json.loads(json.dumps(sync.plain(SAID)))
    got: dict[str, Any] = {}
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda **arguments: got.update(arguments) or torch.zeros(4, 6))
    assert sync._opened(told, torch.device("cuda", 1)) is not None
    want = dict(zip(sync._ARGUMENTS, SAID, strict=True)) | {"storage_device": 1, "tensor_size": [4, 6], "tensor_stride": [6, 1], "dtype": torch.uint8,
                                                            "event_sync_required": False}
    assert got == want, "the device has another number here"


def _open(handle: dict[str, Any], answer: Any, more: Any) -> None:
    window = sync._opened(handle, torch.device("cuda", 0))
    answer.send(None if window is None else window[:64].tolist())
    more.recv()
    assert window is not None
    answer.send(window[:64].tolist())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_another_process_sees_our_window_and_what_is_put_there_later() -> None:
    window = sync._window(torch.device("cuda", 0))
    assert window is not None
    context = mp.get_context("spawn")
    for _ in range(2):  # the same one for each process, also after one that ended
        (ours, theirs), (go, wait) = context.Pipe(), context.Pipe()
        process = context.Process(target=_open, args=(json.loads(json.dumps(window.handle)), theirs, wait), daemon=True)
        put(window, 0)
        process.start()
        try:
            assert ours.poll(120) and ours.recv() == [*range(64)]
            put(window, 9)
            go.send(None)
            assert ours.poll(120) and ours.recv() == [*range(9, 73)]
        finally:
            process.join(30)


_ROUNDS = 3


def _weights(round: int, device: str) -> list[tuple[str, torch.Tensor]]:
    """Small ones, several buckets of them, and one larger than the window."""
    generator = torch.Generator().manual_seed(round)
    sizes = [(3, 5), (), (0,), *[(4096, 1024)] * 9, (sync._WINDOW_BYTES // 4 + 1000,)]
    return [(f"w{i}", torch.randn(size, generator=generator).to(device)) for i, size in enumerate(sizes)]


def _take_rounds(port: int, answers: Any) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    for number in range(_ROUNDS):
        with sync.stream(f"round{number}", store, 120.0) as end:
            got = dict(sync.receive(end.join(), number, torch.device("cuda", 0)))
        same = all(got[name].is_cuda and torch.equal(got[name].cpu(), tensor) for name, tensor in _weights(number, "cpu"))
        answers.send((len(got), same))
        time.sleep(0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_weights_reach_another_process_through_the_window_round_after_round(caplog: pytest.LogCaptureFixture) -> None:
    """As an engine takes them: the window is opened anew in each round by the same process."""
    device, context = torch.device("cuda", 0), mp.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours, theirs = context.Pipe()
    process = context.Process(target=_take_rounds, args=(store.port, theirs), daemon=True)
    process.start()
    try:
        for number in range(_ROUNDS):
            weights = _weights(number, "cuda")
            assert not sync.serve({"engine": f"round{number}"}, store, 120.0, "127.0.0.1", weights, number, device)
            assert ours.poll(60) and ours.recv() == (len(weights), True)
    finally:
        process.join(30)
    assert "host memory" not in caplog.text and process.exitcode == 0


def put(window: sync._Window, first: int) -> None:
    window.memory[:64].copy_(torch.arange(first, first + 64, dtype=torch.uint8))
    torch.cuda.synchronize()


class Line:
    """One end of a stream to a receiver of this process."""

    def __init__(self, out: queue.Queue[bytes], into: queue.Queue[bytes]):
        self._out, self._in, self._got = out, into, b""

    def send(self, data: memoryview) -> None:
        self._out.put(bytes(data))

    def end(self) -> None:
        self._out.put(b"")

    def receive_into(self, data: memoryview) -> None:
        while len(self._got) < len(data):
            if not (more := self._in.get(timeout=20)):
                raise LinkBroken("closed")
            self._got += more
        data[:], self._got = self._got[: len(data)], self._got[len(data) :]


@pytest.mark.parametrize("reached", [True, False])
def test_weights_go_through_a_window_or_as_bytes_to_who_cannot_open_it(monkeypatch: pytest.MonkeyPatch, reached: bool) -> None:
    """With host memory for a device's. One engine is on another machine. Pieces of a tensor that is larger than the window; several in one."""
    sizes = [7, 30, 1, 0, 1700, 5, 300]
    weights = [(f"w{i}", torch.randn(size).to(torch.bfloat16 if i % 2 else torch.float32)) for i, size in enumerate(sizes)]
    held, buckets = dict(weights), []
    memory = torch.zeros(2048, dtype=torch.uint8)
    monkeypatch.setattr(sync, "_WINDOW_BYTES", 2048)
    monkeypatch.setattr(sync, "_window", lambda device: sync._Window(memory, {"it": 1}))
    monkeypatch.setattr(sync, "_opened", lambda handle, device: memory if reached and handle == {"it": 1} else None)
    copied = sync._copied

    def looking(said: dict[str, Any], window: torch.Tensor, begun: dict[str, torch.Tensor], device: torch.device) -> list[tuple[str, torch.Tensor]]:
        buckets.append([(what["name"], what["at"]) for what in said["shown"]])
        return copied(said, window, begun, torch.device("cpu"))

    monkeypatch.setattr(sync, "_copied", looking)
    got, nbytes, failed = transfer(weights)
    assert not failed and nbytes == sum(tensor.nbytes for tensor in held.values())
    several = [[("w0", 0), ("w1", 0), ("w2", 0), ("w3", 0)], [("w4", 0)], [("w4", 2048)], [("w4", 4096)], [("w4", 6144), ("w5", 0)], [("w6", 0)]]
    assert buckets == (several if reached else [])
    for engine, made in got.items():
        assert list(made) == list(held) and all(torch.equal(made[name], held[name]) for name in held), engine


def test_what_a_window_shows_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies there is not what was shown: the engine on this machine gets nothing, the other one all."""
    memory = torch.zeros(2048, dtype=torch.uint8)
    monkeypatch.setattr(sync, "_window", lambda device: sync._Window(memory, {}))
    monkeypatch.setattr(sync, "_opened", lambda handle, device: torch.ones(2048, dtype=torch.uint8))
    copied = sync._copied
    monkeypatch.setattr(sync, "_copied", lambda said, window, begun, device: copied(said, window, begun, torch.device("cpu")))
    got, _, failed = transfer([("w", torch.randn(4))])
    assert list(got["there"]) == ["w"] and "here" not in got and list(failed) == ["here"]


def test_who_does_not_come_makes_nobody_else_miss_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines are stuck; the third, which waits all along and whose own deadline began to run first, gets them; the stuck ones have half of it."""
    store = dist.HashStore()
    weights, got = [("w", torch.randn(4))], dict[str, torch.Tensor]()

    def join() -> None:
        with sync.stream("c", store, 8.0) as end:
            got.update(sync.receive(end.join(), 3))

    thread = threading.Thread(target=join)
    thread.start()
    start = time.monotonic()
    missed = sync.serve({"a": "a", "b": "b", "c": "c"}, store, 8.0, "127.0.0.1", weights, 3)
    thread.join(20)
    assert sorted(missed) == ["a", "b"] and torch.equal(got["w"], weights[0][1])
    assert time.monotonic() - start < 7.0, "one deadline, not one after the other"
    assert "nobody came in 4 s (rollout.sync_timeout_s)" in missed["a"]


def transfer(weights: list[tuple[str, torch.Tensor]]) -> tuple[dict[str, dict[str, torch.Tensor]], int, dict[str, str]]:
    """To an engine here, with a device, and one without: engine -> what it got, and what ``send`` says."""
    got: dict[str, dict[str, torch.Tensor]] = {}
    ends, threads = {}, []

    def take(engine: str, line: Line, device: torch.device | None) -> None:
        try:
            got[engine] = dict(sync.receive(line, 4, device))  # type: ignore[arg-type]
        except LinkBroken:
            line.end()

    for engine, device in (("here", torch.device("cuda", 0)), ("there", None)):
        there, back = queue.Queue[bytes](), queue.Queue[bytes]()
        ends[engine] = Line(there, back)
        threads.append(threading.Thread(target=take, args=(engine, Line(back, there), device)))
        threads[-1].start()
    nbytes, failed = sync.send(ends, weights, 4, torch.device("cuda", 0))  # type: ignore[arg-type]
    for thread in threads:
        thread.join(20)
    return got, nbytes, failed
