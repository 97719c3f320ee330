"""A spare rehearses, so that what a process does for the first time it does not do when it is needed.

By itself it forms a world of one rank, builds the run's model with a single layer, makes one step on random tokens, and drops all of it. By
then libraries are loaded (NCCL too), kernels compiled, the allocator has its first blocks; what is left of taking a place is to meet the
others, to build the model, and the state.
"""

from __future__ import annotations

import copy
import logging
import time
from typing import Any

import torch
import torch.distributed as dist

from everstep.cluster.batch import TrainingBatch
from everstep.config.schema import Config
from everstep.engine.groups import close_groups
from everstep.engine.loss import LossSpec
from everstep.engine.step import Engine
from everstep.layout import Layout, Position
from everstep.telemetry.events import EventLog

LOG = logging.getLogger(__name__)
_LOSS = LossSpec("everstep.rl.losses:sft_loss")
_TOKENS = 128  # of a sample at most: kernels are the same for more


def rehearse(config: Config, hf_config: Any, device: torch.device, events: EventLog) -> None:
    """On a spare's main thread, while nobody needs it. One that fails is told and changes nothing: the spare is as good as without."""
    if config.recovery.rehearse == "auto" and device.type != "cuda":
        return
    start = time.monotonic()
    try:
        _one_step(config, hf_config, device)
    except Exception as error:  # whatever it is, a spare is as good without
        LOG.exception("the rehearsal failed")
        events.emit("error", error=type(error).__name__, message=f"a spare's rehearsal failed: {error}")
        return
    events.emit("rehearsed", seconds=time.monotonic() - start)


def _one_step(config: Config, hf_config: Any, device: torch.device) -> None:
    small = copy.deepcopy(hf_config)
    small.num_hidden_layers = 1
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:1]
    alone = config.model_copy(update={
        "layout": config.layout.model_copy(update={"replicas": 1, "tp": 1, "cp": 1, "pp": 1, "dp": 1, "ep": 1, "vpp": 1, "layers_per_stage": None}),
        "engine": config.engine.model_copy(update={"sequence_parallel": False}),
    })
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        engine = Engine(alone, small, Position(), Layout(), device)
        try:
            engine.init_random(config.seed)
            tokens = min(_TOKENS, config.data.max_tokens)
            ids = torch.randint(0, small.vocab_size, (config.train.micro_batch_size or 1, tokens))
            ones = torch.ones_like(ids)
            batch = TrainingBatch({"input_ids": ids, "attention_mask": ones, "loss_mask": ones.float()}, sample_ids=[str(i) for i in range(len(ids))])
            engine.accumulate([batch], _LOSS.build(), [0], 1.0)
            dist.all_reduce(torch.zeros(1, device=device))
            engine.apply(engine.gradients(), 1.0, config.optimizer.lr)
        finally:
            engine.close()
    finally:
        close_groups()
