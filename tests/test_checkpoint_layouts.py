"""What one layout saved, every other one loads, bit by bit, the optimizer included.

A state makes a journey: each stop loads what the stop before saved, saves it again, and then makes one more step. At every stop all
logical tensors are bitwise those of the start; the loss and the norm of the gradient are those of the start's next step.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from everstep.checkpoint.index import INDEX, Index, Receipt, make_index
from everstep.checkpoint.sharded import load_part, my_share, staged_files, whole_tensor
from everstep.checkpoint.storage import as_json, write_file
from everstep.errors import BadInput
from everstep.layout import Layout
from support.models import tiny_config
from support.processes import run_ranks
from test_engine_state import data, engine_of, one_step


@dataclass(frozen=True)
class Stop:
    """``replicas``: how many share the saving. Names are those of the layout."""

    layout: Layout = field(default_factory=Layout)
    engine: dict[str, Any] = field(default_factory=dict)
    replicas: int = 1

    def __str__(self) -> str:
        sizes = [f"{n}{getattr(self.layout, n)}" for n in ("tp", "cp", "ep", "dp", "pp", "vpp") if getattr(self.layout, n) > 1]
        return "-".join([*sizes, *map(str, self.engine), *([f"{self.replicas}replicas"] if self.replicas > 1 else [])]) or "one"


def allocate(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def write_share(engine: Any, folder: Path, rank: int, replica: int, replicas: int) -> Receipt:
    share = my_share({"model": engine.logical_state()()}, replica, replicas)
    files = staged_files(share, f"x-{replica}.{rank:03d}", allocate, file_bytes=20_000)
    entries, rectangles = {}, {}
    for file in files:
        file.copy()
        content, rectangles[file.name] = file.finish()
        entries[file.name] = write_file(folder / file.name, content)
    return Receipt(rank, replica, entries, rectangles, {"model": engine.state_scalars()})


def visit(rank: int, stop: Stop, hf: Any, sections: dict[str, Any], came_from: Path | None, folder: Path) -> tuple[list[Receipt], Any]:
    keeps_reference = sections.get("reference")
    settings = {**{k: v for k, v in sections.items() if k != "reference"}, "engine": {**sections.get("engine", {}), **stop.engine}}
    engine = engine_of(stop.layout, rank, hf=hf, seed=3 if came_from is None or "lora" in sections else None, **settings)
    if came_from is None:
        for step in range(2):
            one_step(engine, data(stop.layout, rank, step))
        if keeps_reference:
            engine.keep_reference()
            one_step(engine, data(stop.layout, rank, 2))
    else:
        index = Index(came_from)
        scalars = index.scalars_of("model")[0]
        if "frozen_digest" in scalars:
            scalars = scalars | {"frozen_digest": engine.state_scalars()["frozen_digest"]}
        engine.load_scalars(scalars)
        load_part(index, "model", engine.logical_state()())
    receipts = [write_share(engine, folder, rank, replica, stop.replicas) for replica in range(stop.replicas)]
    return receipts, one_step(engine, data(stop.layout, rank, 5))


def travel(stops: list[Stop], hf: Any, tmp_path: Path, close: float = 1e-5, **sections: Any) -> None:
    reference = sections.pop("reference", False)
    before: Path | None = None
    start: Index | None = None
    for number, stop in enumerate(stops):
        folder = tmp_path / f"{number}-{stop}"
        more = {"reference": True} if reference else {}
        results = run_ranks(visit, stop.layout.ranks_per_replica, stop, hf, sections | more, before, folder)
        receipts = [receipt for receipts, _ in results for receipt in receipts]
        index_content = make_index(receipts)
        write_file(folder / INDEX, as_json(index_content))
        index = Index(folder)
        loss, norm2 = results[0][1]
        if start is None:
            start, first = index, (loss, norm2)
            kinds = {name.split("/")[1] for name in index.tensors}
            assert kinds >= {"param", "exp_avg", "exp_avg_sq"} and ("reference" in kinds) == reference
        assert index.tensors.keys() == start.tensors.keys()
        for name in start.tensors:
            assert torch.equal(whole_tensor(index, name), whole_tensor(start, name)), (str(stop), name)
        written = [r for receipt in receipts for file in receipt.rectangles.values() for r in file]
        assert sum(r["nbytes"] for r in written) == sum(whole_tensor(start, n).nbytes for n in start.tensors), "each byte once"
        writers = {(receipt.replica, receipt.rank) for receipt in receipts if receipt.files}
        assert len(writers) == stop.layout.ranks_per_replica * stop.replicas, "everybody writes"
        assert loss == pytest.approx(first[0], rel=close) and norm2 == pytest.approx(first[1], rel=20 * close), str(stop)
        before = folder


UNSHARDED = {"distributed_optimizer": False}
SP = {"sequence_parallel": True}


def test_a_dense_model_travels(tmp_path: Path) -> None:
    stops = [Stop(Layout(tp=2)), Stop(Layout(pp=2)), Stop(Layout(dp=2), replicas=2), Stop(), Stop(Layout(cp=2), UNSHARDED)]
    travel(stops, tiny_config("qwen3", tied=True), tmp_path)


def test_experts_travel(tmp_path: Path) -> None:
    stops = [Stop(Layout(dp=2, ep=2)), Stop(Layout(tp=2), SP), Stop(Layout(pp=2)), Stop(replicas=3)]
    travel(stops, tiny_config("qwen3_moe"), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
    ("stops", "family", "sections"),
    [
        ([Stop(Layout(tp=2, dp=2)), Stop(Layout(pp=2, vpp=2)), Stop(Layout(pp=4), replicas=2), Stop(Layout(dp=4)), Stop(Layout(tp=2, pp=2))],
         "llama", {}),
        ([Stop(Layout(dp=2, tp=2, ep=2), SP), Stop(Layout(dp=4, ep=4)), Stop(Layout(pp=2, dp=2, ep=2)), Stop(Layout(dp=2), UNSHARDED)],
         "mixtral", {}),
        ([Stop(Layout(dp=2)), Stop(Layout(tp=2), UNSHARDED), Stop(Layout(pp=2)), Stop(Layout(dp=2, tp=2), replicas=2)],
         "qwen3", {"model": {"dtype": "bfloat16"}}),
        ([Stop(Layout(tp=2)), Stop(Layout(dp=2)), Stop(Layout(pp=2)), Stop(Layout(tp=2), SP), Stop()],
         "qwen3", {"lora": {"rank": 4}, "reference": True}),
        ([Stop(Layout(dp=2)), Stop(Layout(tp=2)), Stop(Layout(pp=2))], "qwen2", {"reference": True}),
    ],
    ids=["llama", "mixtral", "bfloat16", "lora", "reference"],
)
def test_others_travel(stops: list[Stop], family: str, sections: dict[str, Any], tmp_path: Path) -> None:
    close = 3e-2 if "model" in sections else 1e-5
    travel(stops, tiny_config(family, tied=family == "qwen3", **({"num_hidden_layers": 4})), tmp_path, close, **sections)


def refused(rank: int, hf: Any, sections: dict[str, Any], folder: Path) -> str:
    engine = engine_of(Layout(), rank, hf=hf, **sections)
    before = {name: tensor.clone() for name, tensor in engine.state().items()}
    with pytest.raises(BadInput) as caught:
        load_part(Index(folder), "model", engine.logical_state()())
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.state().items()), "written to before it was refused"
    return str(caught.value)


def test_another_model_is_refused_by_the_name_of_what_differs(tmp_path: Path) -> None:
    (receipts, _), = run_ranks(visit, 1, Stop(), tiny_config("qwen3"), {}, None, tmp_path)
    write_file(tmp_path / INDEX, as_json(make_index(receipts)))
    for hf, sections, says in (
        (tiny_config("qwen2"), {}, r"lacks .*bias"),
        (tiny_config("qwen3", num_hidden_layers=3), {}, "has .*layers.3"),
        (tiny_config("qwen3", intermediate_size=64), {}, r"param/model.layers.0.mlp.gate_proj.weight has shape \[48, 32\], the model's has \[64, 32\]"),
        (tiny_config("qwen3"), {"model": {"dtype": "bfloat16"}}, "lacks master/"),
    ):
        (said,) = run_ranks(refused, 1, hf, sections, tmp_path)
        assert re.search(says, said), said
