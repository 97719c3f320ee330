"""What a checkpoint costs: ``python -m benchmarks.checkpoint [--hidden N] [--layers N] [--every N] [--saves N] [--device cpu|cuda]``.

One rank with a model of that size, in one process; ``--samples`` and ``--tokens`` say how much a step computes. Each round makes ``--every`` optimizer steps three times: without a save; with one
by everstep before the first step (copied and written while steps compute, Hugging Face weights left out); and with one by
``torch.distributed.checkpoint``, synchronously, as most trainers do. Told of both: how long training was blocked, and what part of a
step that is; how much longer the steps took together, whatever the reason (the cores, the interpreter and memory are shared with what
writes); when the checkpoint was complete, bytes, and how long it takes to restore. Medians; the page cache is warm for both.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table

from benchmarks.circumstances import circumstances
from everstep.checkpoint import rng, sharded
from everstep.checkpoint.index import Index
from everstep.checkpoint.saving import RankOf, SavedRun, Saver
from everstep.checkpoint.writer import RankWriter
from everstep.cluster.batch import TrainingBatch
from everstep.config import derive
from everstep.config.load import load_config
from everstep.engine import cpu, source
from everstep.engine.loss import LossSpec
from everstep.telemetry.events import EventLog, read_events

EXAMPLES = Path(__file__).parents[1] / "examples"


def model_folder(folder: Path, hidden: int, layers: int, tokens: int) -> Path:
    shutil.copytree(EXAMPLES / "models" / "tiny-qwen3", folder)
    described = json.loads((folder / "config.json").read_text())
    described |= {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    described["max_position_embeddings"] = max(tokens, described["max_position_embeddings"])
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def batch(samples: int, tokens: int) -> TrainingBatch:
    ids = torch.randint(4, 16, (samples, tokens), generator=torch.Generator().manual_seed(0))
    ones = torch.ones_like(ids)
    return TrainingBatch({"input_ids": ids, "attention_mask": ones, "loss_mask": ones.float()}, sample_ids=[str(i) for i in range(samples)])


class Bench:
    def __init__(
        self, folder: Path, hidden: int, layers: int, device: torch.device, dtype: str = "float32", samples: int = 8, tokens: int = 64
    ) -> None:
        from everstep.engine.step import Engine

        self.folder, self.device = folder, device
        model = model_folder(folder / "model", hidden, layers, tokens)
        self.config = load_config(EXAMPLES / "sft_text.yaml", [
            f"model.path={model}", f"run_dir={folder / 'run'}", "layout.replicas=1", "checkpoint.hf=false", f"device={device.type}",
            "checkpoint.keep_last=1", f"model.dtype={dtype}",
        ])  # fmt: skip
        self.layout = derive.layout(self.config)
        if device.type == "cpu":
            cpu.apply()
        self.master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        connect = lambda: dist.TCPStore("127.0.0.1", self.master.port, is_master=False, timeout=timedelta(seconds=60))
        dist.init_process_group(backend, store=dist.PrefixStore("world", connect()), rank=0, world_size=1)
        resolved = source.resolve(self.config.model)
        self.engine = Engine(self.config, resolved.hf_config, self.layout.position(0), self.layout, device)
        self.engine.init_random(0)
        self.loss = LossSpec("everstep.rl.losses:sft_loss").build()
        self.batch = batch(samples, tokens)
        events = EventLog(folder / "events" / "lead.jsonl", "lead")
        self.saver = Saver(self.config, self.layout, events, connect, lambda worker: None)
        self.writer = RankWriter(connect, device, events)
        self.steps = 0

    def step(self) -> tuple[float, float]:
        """Seconds of one optimizer step, and of them those for which its apply waited for a copy."""
        start = time.perf_counter()
        self.engine.accumulate([self.batch], self.loss, [0])
        waited = self.writer.settle(600.0)
        self.engine.apply(self.engine.gradients(), 1e-3, 1e-4)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.steps += 1
        return time.perf_counter() - start, waited

    def steps_made(self, every: int) -> tuple[float, float]:
        """Seconds of ``every`` steps, and of waiting for a copy."""
        made = [self.step() for _ in range(every)]
        return sum(seconds for seconds, _ in made), sum(waited for _, waited in made)

    def everstep(self, every: int) -> dict[str, float]:
        start = time.perf_counter()
        (ticket,) = self.saver.begin(SavedRun(self.steps, False, {}), 1, patient=False) or []
        self.writer.begin(ticket, 0, {"model": self.engine.logical_state()}, {"model": self.engine.state_scalars()}, rng.capture(self.device))
        self.saver.follow([RankOf("w0", 0, 0)], 0.0)
        begun = time.perf_counter() - start
        steps_s, waited = self.steps_made(every)
        path = self.saver.wait()
        assert path is not None
        (saved,) = [e for e in read_events(self.folder / "events") if e.event == "save" and e.step == ticket.step]
        complete = float(saved["seconds"])
        nbytes = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
        start = time.perf_counter()
        index = Index(path)
        sharded.load_part(index, "model", self.engine.logical_state()())
        restore = time.perf_counter() - start
        return {"blocked_s": begun + waited, "window_s": begun + steps_s, "complete_s": complete, "bytes": float(nbytes), "restore_s": restore}

    def torch_checkpoint(self, every: int) -> dict[str, float]:
        state: dict[str, Any] = dict(self.engine.state())
        path = self.folder / f"dcp-{self.steps}"
        start = time.perf_counter()
        dcp.save(state, checkpoint_id=str(path))
        blocked = time.perf_counter() - start
        steps_s, _ = self.steps_made(every)
        nbytes = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
        start = time.perf_counter()
        dcp.load(state, checkpoint_id=str(path))
        restore = time.perf_counter() - start
        shutil.rmtree(path)
        return {"blocked_s": blocked, "window_s": blocked + steps_s, "complete_s": blocked, "bytes": float(nbytes), "restore_s": restore}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="of one optimizer step")
    parser.add_argument("--tokens", type=int, default=64, help="of a sample")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the weights; masters and moments are float32")
    parser.add_argument("--every", type=int, default=10, help="steps from one save to the next")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: the system's folder for temporary files")
    parser.add_argument("--out", type=Path, default=None)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder, prefix="everstep-checkpoint-") as folder:
        bench = Bench(Path(folder), chosen.hidden, chosen.layers, torch.device("cuda", 0) if chosen.device == "cuda" else torch.device("cpu"), chosen.dtype, chosen.samples, chosen.tokens)
        bench.steps_made(3)
        plain: list[float] = []
        measured: dict[str, list[dict[str, float]]] = {"everstep": [], "torch.distributed.checkpoint": []}
        for number in range(chosen.saves + 1):
            window_s, _ = bench.steps_made(chosen.every)
            for name, save in (("everstep", bench.everstep), ("torch.distributed.checkpoint", bench.torch_checkpoint)):
                found = save(chosen.every)
                if number:  # the first one gets its memory
                    measured[name].append(found | {"longer": found["window_s"] / window_s - 1})
                    plain.append(window_s)
        dist.destroy_process_group()
    step_s = statistics.median(plain) / chosen.every
    result: dict[str, Any] = {
        "about": circumstances("checkpoint"), "device": chosen.device, "hidden": chosen.hidden, "layers": chosen.layers, "dtype": chosen.dtype, "samples": chosen.samples, "tokens": chosen.tokens, "every": chosen.every, "saves": chosen.saves, "step_s": step_s,
    }  # fmt: skip
    title = f"{chosen.device} ({result['about']['machine']}); a step takes {step_s:.3f} s, a save every {chosen.every} steps"
    table = Table("", "blocked", "of a step", "steps longer by", "complete after", "written", "restored in", title=title)
    for name, rows in measured.items():
        middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        middle["gb_per_s"] = middle["bytes"] / middle["complete_s"] / 1e9
        result[name] = middle
        table.add_row(name, f"{1000 * middle['blocked_s']:.1f} ms", f"{100 * middle['blocked_s'] / step_s:.1f}%",
                      f"{100 * middle['longer']:.1f}%", f"{middle['complete_s']:.2f} s",
                      f"{middle['bytes'] / 1e6:.0f} MB, {middle['gb_per_s']:.2f} GB/s", f"{middle['restore_s']:.2f} s")
    Console(width=120).print(table)
    if chosen.out:
        chosen.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
