"""Ray Train's own recovery: when a worker dies the controller ends all, starts them again, and they load the last checkpoint.

    python -m benchmarks.rivals.ray_train --log FOLDER --active 3
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from pathlib import Path

from benchmarks.rivals import say
from benchmarks.rivals.work import Work, parse

EVERY = 5  # steps between checkpoints


def loop(told: dict[str, object]) -> None:
    import ray.train
    import torch
    import torch.distributed as dist

    args = argparse.Namespace(**told)
    args.number = ray.train.get_context().get_world_rank()
    work = Work(args)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            work.load(torch.load(Path(folder) / "state.pt", weights_only=True))
    size = dist.get_world_size()
    while True:
        work.backward(args.number)
        dist.all_reduce(work.flat)
        work.flat /= size
        work.apply()
        say(args.log, work.step, size)
        if work.step % EVERY == 0:
            with tempfile.TemporaryDirectory() as folder:
                saved = None
                if args.number == 0:
                    torch.save(work.state(), Path(folder) / "state.pt")
                    saved = ray.train.Checkpoint.from_directory(folder)
                ray.train.report({"step": work.step}, checkpoint=saved)


def main() -> None:
    args = parse()
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(num_cpus=args.active + 1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, _node_ip_address="127.0.0.1")
    TorchTrainer(
        loop, train_loop_config=vars(args), torch_config=TorchConfig(backend="nccl" if args.device == "cuda" else "gloo", timeout_s=30),
        scaling_config=ScalingConfig(num_workers=args.active, use_gpu=args.device == "cuda"),
        run_config=RunConfig(storage_path=str(Path(args.log) / "storage"), failure_config=FailureConfig(max_failures=-1),
                             checkpoint_config=CheckpointConfig(num_to_keep=2)),
    ).fit()


if __name__ == "__main__":
    main()
