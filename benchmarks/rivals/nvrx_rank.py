"""One rank under NVIDIA's in-process restart (https://github.com/NVIDIA/nvidia-resiliency-ext): all processes stay, the training function
begins anew on those that live, a reserve rank among them; weights and optimizer stay in memory and are sent from rank 0.

    RANK=0 WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=29511 python -m benchmarks.rivals.nvrx_rank --log FOLDER
"""

# No postponed annotations: the wrapper finds by the type of a parameter that it is to be passed itself.

import os
from datetime import timedelta

import nvidia_resiliency_ext.inprocess as inprocess
import torch
import torch.distributed as dist

from benchmarks.rivals import say
from benchmarks.rivals.work import Work, parse

TICK = timedelta(milliseconds=100)


def main() -> None:
    args = parse()
    work = Work(args)

    @inprocess.Wrapper(
        store_kwargs={"timeout": timedelta(seconds=60)},
        rank_assignment=inprocess.Compose(
            inprocess.rank_assignment.ActiveWorldSizeDivisibleBy(1), inprocess.rank_assignment.MaxActiveWorldSize(args.active),
            inprocess.rank_assignment.ShiftRanks(),
        ),
        monitor_thread_interval=TICK, monitor_process_interval=TICK, heartbeat_interval=TICK, progress_watchdog_interval=TICK, last_call_wait=TICK,
        soft_timeout=timedelta(seconds=20), hard_timeout=timedelta(seconds=30), heartbeat_timeout=timedelta(seconds=10),
    )
    def train(call_wrapper: inprocess.CallWrapper = None) -> None:  # type: ignore[assignment]
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)  # the wrapper's own
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo", store=dist.PrefixStore(f"train/{call_wrapper.iteration}", store),
                                rank=rank, world_size=size, timeout=timedelta(seconds=10))
        _take_from_the_newest(work, size)
        while True:
            work.backward(rank)
            dist.all_reduce(work.flat)
            work.flat /= size
            work.apply()
            say(args.log, work.step, size)

    train()


def _take_from_the_newest(work: Work, size: int) -> None:
    """Ranks that lived on hold the last step or the one before it, a reserve rank none."""
    steps = [torch.zeros(1, dtype=torch.int64, device=work.device) for _ in range(size)]
    dist.all_gather(steps, torch.tensor([work.step], device=work.device))
    newest = max(range(size), key=lambda rank: int(steps[rank]))
    if not int(steps[newest]):
        return
    if not work.optimizer.state:  # its tensors must be there before they can be received
        work.flat.zero_()
        work.optimizer.step()
    for parameter in work.model.parameters():
        dist.broadcast(parameter.data, newest)
        for value in work.optimizer.state[parameter].values():
            if torch.is_tensor(value):
                dist.broadcast(value, newest)
    work.step = int(steps[newest])


if __name__ == "__main__":
    main()
