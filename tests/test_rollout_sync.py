"""Weights that an engine copies from the source's device memory: what is said of it, and the copy."""

from __future__ import annotations

import json
import multiprocessing as mp
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from everstep.rl.rollout import sync

SAID = (torch.Tensor, torch.Size([4, 6]), (6, 1), 24, torch.storage.TypedStorage, torch.bfloat16, 3, b"\x00memory\xff", 4096, 512, False,
        b"counter", 2, b"event\x80", True)  # fmt: skip


def test_a_handle_of_device_memory_travels_as_json(monkeypatch) -> None:
    told = json.loads(json.dumps(sync.plain(SAID)))
    got: dict[str, Any] = {}
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda **arguments: got.update(arguments) or torch.zeros(4, 6, dtype=torch.bfloat16))
    said = {"name": "w", "shape": [4, 6], "dtype": "bfloat16", "handle": told, "digest": 0}
    assert sync._copied(said, torch.device("cuda", 1)) is not None
    want = dict(zip(sync._ARGUMENTS, SAID, strict=True)) | {"storage_device": 1, "tensor_size": [4, 6], "tensor_stride": [6, 1]}
    assert got == want, "the device has another number here"


def _copy(said: dict[str, Any], answer: Any) -> None:
    copy = sync._copied(said, torch.device("cuda", 0))
    answer.send(None if copy is None else copy.float().cpu().tolist())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_another_process_copies_a_tensor_out_of_our_device_memory(dtype: torch.dtype) -> None:
    whole = torch.arange(4096, device="cuda").to(dtype).view(64, 64)[8:16].contiguous()
    said = {"name": "w", "shape": [8, 64], "dtype": str(dtype).removeprefix("torch."), **sync._handle(whole)}
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_copy, args=(json.loads(json.dumps(said)), theirs), daemon=True)
    process.start()
    try:
        assert ours.poll(120) and ours.recv() == whole.float().cpu().tolist()
    finally:
        process.join(30)
