"""One replica group of torchft (https://github.com/meta-pytorch/torchft): a Manager, gloo or NCCL between groups, a flat gradient.

    python -m benchmarks.rivals.torchft_rank --log FOLDER --number 0 --address http://HOST:PORT
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from benchmarks.rivals import say
from benchmarks.rivals.work import Work, parse

TIMEOUT_S = 2.0  # of a collective; shorter ones end steps that only a busy machine made slow


def main() -> None:
    args = parse()
    from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL

    work = Work(args)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    make = ProcessGroupNCCL if args.device == "cuda" else ProcessGroupGloo
    manager = Manager(
        pg=make(timeout=timedelta(seconds=TIMEOUT_S)), load_state_dict=work.load, state_dict=work.state, min_replica_size=1,
        timeout=timedelta(seconds=TIMEOUT_S * 5), quorum_timeout=timedelta(seconds=60), rank=0, world_size=1, store_addr="127.0.0.1",
        store_port=store.port, lighthouse_addr=args.address, replica_id=f"group_{args.number}", heartbeat_interval=timedelta(milliseconds=100),
    )
    while True:
        manager.start_quorum()
        work.backward(args.number)
        manager.allreduce(work.flat).wait()
        if manager.should_commit():
            work.optimizer.step()
            work.step = manager.current_step()
            say(args.log, work.step, manager.num_participants())


if __name__ == "__main__":
    main()
