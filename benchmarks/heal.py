"""How fast a state goes from one process of this machine to another: the transports a heal could use, each with its checksums.

    python -m benchmarks.heal                     256 MiB, five times each, in turn
    python -m benchmarks.heal --mib 2048 --times 3

``tcp``: what a heal does (everstep.recovery.heal): read into a buffer, checksum, one connection, checksum, in place. ``tcp, no checksum``:
the same bytes with nothing around them. ``gloo``: send and receive of a process group (checksums on both sides). ``shared memory``: the
source copies into a segment, the joiner out of it, piece by piece, checksums on both sides.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from benchmarks.circumstances import circumstances
from everstep.engine.offload import host_bytes
from everstep.recovery import heal

never: Callable[[], bool] = lambda: False


class _State:
    island = False

    def __init__(self, nbytes: int, value: float, version: int | None):
        self.version = version
        self._tensors = {"state": torch.full((nbytes // 4,), value)}

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._tensors

    def scalars(self) -> dict[str, Any]:
        return {}

    def load_scalars(self, scalars: dict[str, Any]) -> None: ...


def _pieces(tensor: torch.Tensor) -> list[memoryview]:
    return [host_bytes(piece) for piece in tensor.view(torch.uint8).split(heal.PIECE_BYTES)]


def tcp(rank: int, store: dist.Store, name: str, tensor: torch.Tensor, nbytes: int) -> None:
    state = _State(0, 0.0, 1 if rank == 0 else None)
    state._tensors = {"state": tensor}
    stream = heal.HealStream(name, store, 60.0, never)
    with stream:
        if rank == 0:
            snapshot = heal.Snapshot(state, 1)
            heal.send(stream.serve("127.0.0.1", snapshot.lanes), snapshot)
        else:
            tensors = heal.open_state(stream.join(), state, 1)
            assert tensors is not None
            heal.receive(stream, tensors, 1)


def tcp_bare(rank: int, store: dist.Store, name: str, tensor: torch.Tensor, nbytes: int) -> None:
    with heal.HealStream(name, store, 60.0, never) as stream:
        end = stream.serve("127.0.0.1") if rank == 0 else stream.join()
        for piece in _pieces(tensor):
            end.send(piece) if rank == 0 else end.receive_into(piece)


def gloo(rank: int, store: dist.Store, name: str, tensor: torch.Tensor, nbytes: int) -> None:
    group = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, 2, timedelta(seconds=60))
    for piece in tensor.view(torch.uint8).split(heal.PIECE_BYTES):
        if rank == 0:
            xxhash.xxh3_64_intdigest(host_bytes(piece))
            group.send([piece], 1, 0).wait()  # type: ignore[attr-defined]
        else:
            group.recv([piece], 0, 0).wait()  # type: ignore[attr-defined]
            xxhash.xxh3_64_intdigest(host_bytes(piece))


def shared_memory(rank: int, store: dist.Store, name: str, tensor: torch.Tensor, nbytes: int) -> None:
    """Two pieces' room; who fills and who empties tell each other over a socket."""
    room = 2 * heal.PIECE_BYTES
    with heal.HealStream(name, store, 60.0, never) as stream:
        end = stream.serve("127.0.0.1") if rank == 0 else stream.join()
        word = memoryview(bytearray(1))
        if rank == 1:
            end.receive_into(word)  # it is there
        segment = SharedMemory(name.replace("/", "-"), create=rank == 0, size=room)
        if rank == 0:
            end.send(word)
        buffer = torch.frombuffer(segment.buf, dtype=torch.uint8)
        pieces = tensor.view(torch.uint8).split(heal.PIECE_BYTES)
        for number, piece in enumerate(pieces):
            place = buffer[(number % 2) * heal.PIECE_BYTES :][: piece.numel()]
            if rank == 0:
                if number >= 2:
                    end.receive_into(word)  # the place is free
                place.copy_(piece)
                xxhash.xxh3_64_intdigest(host_bytes(place))
                end.send(word)
            else:
                end.receive_into(word)
                piece.copy_(place)
                xxhash.xxh3_64_intdigest(host_bytes(piece))
                if number + 2 < len(pieces):
                    end.send(word)
        del buffer, place
        segment.close()
        if rank == 0:
            segment.unlink()


WAYS = {"tcp": tcp, "tcp, no checksum": tcp_bare, "gloo": gloo, "shared memory": shared_memory}


def _end(rank: int, port: int, nbytes: int, times: int, results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    tensor = torch.full((nbytes // 4,), 7.0 if rank == 0 else 0.0)
    for number in range(times):
        for way, move in WAYS.items():
            if rank == 1:
                tensor.zero_()
            meet = f"{number}/{way}".replace(" ", "-").replace(",", "")
            store.set(f"here/{meet}/{rank}", "1")
            store.wait([f"here/{meet}/{1 - rank}"])
            start = time.monotonic()
            move(rank, store, f"bench-{os.getppid()}-{meet}", tensor, nbytes)
            if rank == 1:
                assert bool((tensor == 7.0).all()), way
                results.put((way, time.monotonic() - start))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.heal", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("spawn")
    results = context.Queue()
    ends = [context.Process(target=_end, args=(rank, store.port, args.mib << 20, args.times, results), daemon=True) for rank in range(2)]
    for end in ends:
        end.start()
    seconds: dict[str, list[float]] = {}
    for _ in range(args.times * len(WAYS)):
        way, spent = results.get(timeout=300)
        seconds.setdefault(way, []).append(spent)
    for end in ends:
        end.join(30)
    about = circumstances("heal")
    print(f"{args.mib} MiB between two processes; {about['machine']}; {about['versions']}")
    for way, spent in seconds.items():
        print(f"{way:<18} median {args.mib / 1024 / statistics.median(spent):5.2f} GiB/s   best {args.mib / 1024 / min(spent):5.2f} GiB/s")
    if args.out:
        args.out.write_text(json.dumps({"about": about, "mib": args.mib, "seconds": seconds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
