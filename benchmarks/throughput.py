"""How fast the engine trains, in every layout that fits the devices present, and what each switch is worth.

    python -m benchmarks.throughput                                  # all layouts and switches for the GPUs of this machine
    python -m benchmarks.throughput --quick                          # a tiny model, also without a GPU: does it run
    python -m benchmarks.throughput --layout "1 rank" --only "without" --rounds 5
    python -m benchmarks.throughput --switch engine.recompute=full --only engine.recompute --profile build/kernels.txt
    python -m benchmarks.throughput --against torchtitan --only torchtitan    # its step beside ours (benchmarks/rivals/torchtitan_step.py)

One step is what a replica computes between two commits: forward and backward of all micro-batches, the gradient's norm and
AdamW; the links between replicas are left out. Weights and tokens are random, every sequence is ``--tokens`` long, every
token but the first counts in the loss. Prints a table and writes build/throughput.json.

A switch is one setting changed against the base (bfloat16, engine.deterministic=false, everything else at its default). It is
measured beside the base in the same processes, one step of each in turn, and its ratio is the median over the rounds of base
step time over its own (above 1: faster than the base).

    tokens/s per rank   tokens of the step / (seconds x ranks)
    FLOP per token      6 (matrix weights) + 6 layers tokens heads head_dim: three products (forward and both gradients) of 2 FLOP
                        per weight, the output projection among them and the embedding look-up not; and, in attention, queries
                        with keys and probabilities with values over the half of the positions that causality leaves.
                        Recomputation is not counted.
    MFU                 FLOP per token x tokens/s per rank / the card's dense bf16 peak (by its maker's data sheet: ``PEAK``)
    peak                torch's largest allocation in one step, without the other engine of the comparison
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing as mp
import os
import queue
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

from benchmarks.circumstances import ROOT, circumstances
from everstep.config.schema import FusedKernel
from everstep.layout import Layout

SHAPES = ROOT / "benchmarks" / "shapes"
#: Dense bf16 FLOP/s by data sheet; the first name that is contained in the card's counts.
PEAK = {
    "H200": 989.4e12, "H100 PCIe": 756e12, "H100": 989.4e12, "H800": 989.4e12, "B200": 2250e12, "A100": 312e12, "A800": 312e12,
    "L40S": 362e12, "L40": 181e12, "A6000": 155e12, "RTX 4090": 165e12,
}  # fmt: skip
DEADLINE_S = 1800.0  # of one layout, all switches together
KERNELS = get_args(FusedKernel)


@dataclass(frozen=True)
class Switch:
    """A setting changed against the base: of the section ``engine``, or the samples of a micro-batch."""

    name: str
    engine: dict[str, Any] = field(default_factory=dict)
    micro_batch_size: int | None = None
    needs_gpu: bool = False
    rival: str = ""  # another system, as fast as it lets itself be


@dataclass(frozen=True)
class Case:
    """One layout with its switches, as the processes get it."""

    name: str
    layout: dict[str, int]
    engine: dict[str, Any]
    switches: list[Switch]
    shape: str
    tokens: int
    samples: int  # per data-parallel rank and step
    micro_batch_size: int
    rounds: int
    device: str
    profile: str | None = None


@dataclass
class Row:
    layout: str
    switch: str
    ranks: int
    seconds: float = 0.0  # one step, median
    compute_s: float = 0.0  # of it, forward and backward
    tokens_per_s: float = 0.0  # per rank
    flop_per_token: float = 0.0
    mfu: float | None = None
    peak_gib: float | None = None  # of the rank that needs most
    ratio: float | None = None  # to the base in the same rounds
    problem: str = ""


LAYOUTS: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("1 rank", {}, {}),
    ("DP2", {"dp": 2}, {}),
    ("TP2 SP", {"tp": 2}, {"sequence_parallel": True}),
    ("TP2", {"tp": 2}, {}),
    ("PP2", {"pp": 2}, {}),
    ("CP2", {"cp": 2}, {}),
    ("DP4", {"dp": 4}, {}),
    ("DP2 TP2 SP", {"dp": 2, "tp": 2}, {"sequence_parallel": True}),
    ("TP4 SP", {"tp": 4}, {"sequence_parallel": True}),
    ("DP8", {"dp": 8}, {}),
]
SWITCHES = [
    Switch("no fused kernels", {"fused_kernels": "none"}, needs_gpu=True),
    *(Switch(f"without {name}", {"fused_kernels": [k for k in KERNELS if k != name]}, needs_gpu=True) for name in KERNELS),
    Switch("deterministic", {"deterministic": True}, needs_gpu=True),
    *(Switch(f"micro-batch of {size}", micro_batch_size=size) for size in (1, 2, 4, 8)),
    Switch("recompute selective", {"recompute": "selective"}),
    Switch("recompute full", {"recompute": "full"}),
]


def matrix_weights(arch: Any) -> int:
    """Weights of all matrices that a token is multiplied with, of an ``everstep.engine.model.Architecture``."""
    attention = arch.hidden * arch.head_dim * (2 * arch.heads + 2 * arch.kv_heads)
    return int(arch.layers * (attention + 3 * arch.hidden * arch.ffn) + arch.hidden * arch.vocab)


def flop_per_token(arch: Any, tokens: int) -> float:
    """See the module's docstring."""
    return 6.0 * matrix_weights(arch) + 6.0 * arch.layers * tokens * arch.heads * arch.head_dim


def peak_flops(card: str) -> float | None:
    return next((peak for name, peak in PEAK.items() if name in card), None)


def layout_of(sizes: Mapping[str, int]) -> Layout:
    return Layout(**sizes)  # type: ignore[arg-type]  # its other fields are no sizes


# ------------------------------------------------------------------ in the processes


class Trainer:
    """One engine with its batches: one step at a time, timed."""

    def __init__(self, case: Case, switch: Switch, rank: int, device: Any, beside: Trainer | None) -> None:
        import torch
        from transformers import AutoConfig

        from everstep.config.schema import Config
        from everstep.engine.loss import LossSpec
        from everstep.engine.step import Engine

        cuda = device.type == "cuda"
        before = torch.cuda.memory_allocated() if cuda else 0
        layout = layout_of(case.layout)
        settings = {"deterministic": False, **case.engine, **switch.engine}
        config = Config(
            recipe="sft", model={"path": case.shape, "dtype": "bfloat16"}, data={"source": "unused"}, engine=settings
        )  # fmt: skip
        self.device, self.deterministic = device, config.engine.deterministic
        shape = AutoConfig.from_pretrained(case.shape)
        self.engine: Engine = Engine(config, shape, layout.position(rank), layout, device, beside=beside.engine if beside else None)
        if beside is None:
            self.engine.init_random(1)
        else:
            theirs = beside.engine.state()
            self.engine.load_scalars(beside.engine.state_scalars())
            for name, view in self.engine.state().items():
                view.copy_(theirs[name])
        self._loss = LossSpec("everstep.rl.losses:sft_loss").build()
        self.batches = self._batches(case, switch.micro_batch_size or case.micro_batch_size, layout.position(rank).dp)
        self.resident = (torch.cuda.memory_allocated() if cuda else 0) - before
        self.mean_loss = float("nan")  # of the last step

    def close(self) -> None:
        self.engine.close()

    def _batches(self, case: Case, size: int, dp: int) -> list[Any]:
        import torch

        from everstep.cluster.batch import TrainingBatch

        ids = torch.randint(0, self.engine.arch.vocab, (case.samples, case.tokens), generator=torch.Generator().manual_seed(dp))
        ones = torch.ones_like(ids)
        counted = ones.float()
        counted[:, 0] = 0.0  # nothing predicts it
        names = [f"{dp}/{i}" for i in range(case.samples)]
        whole = TrainingBatch({"input_ids": ids, "attention_mask": ones, "loss_mask": counted}, sample_ids=names)
        return [whole.slice(a, min(a + size, case.samples)) for a in range(0, case.samples, size)]

    def step(self) -> tuple[float, float, int]:
        """(seconds of the step, of its forward and backward, bytes allocated at most)."""
        import torch

        from everstep.engine.determinism import set_determinism

        cuda = self.device.type == "cuda"
        set_determinism(self.deterministic, self.device)  # is the process's, and the other engine may want it otherwise
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        weight, total = self.engine.accumulate(self.batches, self._loss, [0] * len(self.batches))[:2].tolist()
        if cuda:
            torch.cuda.synchronize()
        computed = time.perf_counter()
        norm = self.engine.squared_norm(self.engine.gradients()) ** 0.5 / weight
        self.engine.apply(self.engine.gradients(), min(1.0, 1.0 / norm) / weight, 1e-5)
        if cuda:
            torch.cuda.synchronize()
        self.mean_loss = total / weight
        return time.perf_counter() - start, computed - start, torch.cuda.max_memory_allocated() if cuda else 0


def beside(base: Trainer, case: Case, switch: Switch, rank: int) -> Any:
    """A :class:`Trainer`, or a rival's, with the weights of ``base`` now, which has made the step that compiles its kernels. Raises ValueError
    if the rival does not compute the same loss."""
    if not switch.rival:
        trainer = Trainer(case, switch, rank, base.device, base)
        trainer.step()
        return trainer
    from transformers import AutoConfig

    from benchmarks.rivals.torchtitan_step import SAME_LOSS, TitanTrainer

    layout, weights = layout_of(case.layout), dict(base.engine.export_hf())
    shape = AutoConfig.from_pretrained(case.shape)
    titan = TitanTrainer(shape, weights, base.batches, layout, base.device, compiled=base.device.type == "cuda")
    titan.step()
    base.step()
    if not abs(titan.mean_loss / base.mean_loss - 1.0) < SAME_LOSS:
        raise ValueError(f"{switch.rival} computes another loss from the same weights and tokens: {titan.mean_loss:.4f}, everstep {base.mean_loss:.4f}")
    return titan


def worker(rank: int, port: int, case: Case, results: Any) -> None:
    """One rank of ``case``; rank 0 puts a row, as a dictionary, for the base and each switch, and None at the end."""
    import torch
    import torch.distributed as dist

    layout = layout_of(case.layout)
    cuda = case.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        from everstep.engine.groups import NCCL_ENVIRONMENT

        torch.cuda.set_device(device)
        # cuBLAS reads it once; the deterministic engine would find it unset otherwise. On Hopper it is the default's size.
        os.environ.update(NCCL_ENVIRONMENT, CUBLAS_WORKSPACE_CONFIG=":4096:8")
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // layout.ranks_per_replica))
    timeout = datetime.timedelta(seconds=120)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=layout.ranks_per_replica, timeout=timeout)
    card = torch.cuda.get_device_name(device) if cuda else "CPU"

    def row(name: str, steps: list[tuple[float, float, int]], other: int, ratio: float | None) -> Row:
        seconds = statistics.median(step[0] for step in steps)
        tokens = case.samples * layout.dp * case.tokens / layout.ranks_per_replica / seconds
        flop = flop_per_token(base.engine.arch, case.tokens)
        peak = peak_flops(card)
        used = torch.tensor(float(max(step[2] for step in steps) - other), device=device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        return Row(
            case.name, name, layout.ranks_per_replica, seconds, statistics.median(step[1] for step in steps), tokens, flop,
            flop * tokens / peak if peak else None, float(used) / 2**30 if cuda else None, ratio,
        )  # fmt: skip

    def report(made: Row) -> None:
        if rank == 0:
            results.put(asdict(made))

    base = Trainer(case, Switch("base"), rank, device, None)
    base.step()  # kernels are compiled, memory is found
    if case.profile:
        profiled(base, Path(case.profile), rank)
    base_steps = [base.step() for _ in range(case.rounds)]
    report(row("base", base_steps, 0, None))
    for switch in case.switches:
        # A failure, all of whose reasons are the same on every rank, costs its row alone.
        try:
            trainer = beside(base, case, switch, rank)
            pairs = [(base.step(), trainer.step()) for _ in range(case.rounds)]
        except (torch.OutOfMemoryError, ValueError) as error:
            report(Row(case.name, switch.name, layout.ranks_per_replica, problem=str(error).splitlines()[0][:150]))
        else:
            ratio = statistics.median(ours[0] / its[0] for ours, its in pairs)
            report(row(switch.name, [its for _, its in pairs], base.resident, ratio))
        if "trainer" in locals():
            trainer.close()
            del trainer
    if rank == 0:
        results.put(None)
        results.close()
        results.join_thread()
    os._exit(0)  # groups may wait for each other in their destructors


def profiled(trainer: Trainer, path: Path, rank: int) -> None:
    """Where one step spends its time, by kernel, as a table in ``path``."""
    from torch.profiler import ProfilerActivity, profile

    cuda = trainer.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiler:
        trainer.step()
    if rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
        path.write_text(profiler.key_averages().table(sort_by=order, row_limit=60, max_name_column_width=90))


# ------------------------------------------------------------------ starting them


def measure(case: Case) -> list[Row]:
    """All rows of one layout. What went wrong is in the rows' ``problem``."""
    import torch.distributed as dist

    ranks = layout_of(case.layout).ranks_per_replica
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("spawn")
    results: Any = context.Queue()
    processes = [context.Process(target=worker, args=(rank, store.port, case, results)) for rank in range(ranks)]
    for process in processes:
        process.start()
    rows: list[Row] = []
    end = time.monotonic() + DEADLINE_S
    problem = f"not done in {DEADLINE_S:g} s"
    while time.monotonic() < end:
        try:
            made = results.get(timeout=0.5)
        except queue.Empty:
            if any(process.exitcode not in (None, 0) for process in processes):
                problem = "a process ended; its error is above"
                break
            continue
        if made is None:
            problem = ""
            break
        rows.append(Row(**made))
        print(line(rows[-1]), flush=True)
    for process in processes:
        process.kill()
        process.join()
    if problem:
        done = {row.switch for row in rows}
        missing = [name for name in ("base", *(switch.name for switch in case.switches)) if name not in done]
        rows.append(Row(case.name, missing[0] if missing else "end", ranks, problem=problem))
        print(line(rows[-1]), flush=True)
    return rows


def cases(chosen: argparse.Namespace, devices: int, cuda: bool) -> list[Case]:
    switches = [*SWITCHES, *(parsed(text) for text in chosen.switch), *(Switch(name, rival=name) for name in chosen.against)]
    mine = [
        s for s in switches
        if chosen.only in s.name and (cuda or not s.needs_gpu) and s.micro_batch_size != chosen.micro_batch_size
    ]  # fmt: skip
    return [
        Case(
            name, sizes, engine, mine, str(chosen.shape), chosen.tokens, chosen.samples, chosen.micro_batch_size, chosen.rounds,
            "cuda" if cuda else "cpu", str(chosen.profile) if chosen.profile else None,
        )
        for name, sizes, engine in LAYOUTS
        if layout_of(sizes).ranks_per_replica <= devices and (not chosen.layout or name in chosen.layout)
    ]  # fmt: skip


def parsed(text: str) -> Switch:
    """``engine.KEY=VALUE`` as a switch; VALUE is JSON, or else a string."""
    key, equals, value = text.partition("=")
    if not equals or not key.startswith("engine."):
        raise SystemExit(f"--switch {text}: write engine.KEY=VALUE")
    try:
        meant = json.loads(value)
    except json.JSONDecodeError:
        meant = value
    return Switch(text, {key.removeprefix("engine."): meant})


HEAD = ["| layout | switch | tokens/s per rank | MFU | step s | of it compute s | peak GiB | ratio |", "|---|---|--:|--:|--:|--:|--:|--:|"]


def line(row: Row) -> str:
    if row.problem:
        return f"| {row.layout} | {row.switch} | {row.problem} | | | | | |"
    mfu = f"{row.mfu:.1%}" if row.mfu is not None else ""
    peak = f"{row.peak_gib:.1f}" if row.peak_gib is not None else ""
    ratio = f"{row.ratio:.3f}" if row.ratio is not None else ""
    return f"| {row.layout} | {row.switch} | {row.tokens_per_s:,.0f} | {mfu} | {row.seconds:.3f} | {row.compute_s:.3f} | {peak} | {ratio} |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, short sequences, one round")
    parser.add_argument("--shape", type=Path, help="folder with the config.json of the model (default: qwen3-0.6b)")
    parser.add_argument("--tokens", type=int, help="tokens of a sequence (4096)")
    parser.add_argument("--samples", type=int, help="sequences of a step on each data-parallel rank (32)")
    parser.add_argument("--micro-batch-size", type=int, help="sequences of a forward pass (4)")
    parser.add_argument("--rounds", type=int, help="timed steps of the base and of each switch (3)")
    parser.add_argument("--layout", action="append", default=[], help="only this layout, by its name; can be repeated")
    parser.add_argument("--only", default="", help="switches whose name contains this; `-` for none")
    parser.add_argument("--switch", action="append", default=[], help="one more switch, engine.KEY=VALUE; can be repeated")
    parser.add_argument("--against", action="append", default=[], choices=("torchtitan",), help="also another system's step; it must be installed")
    parser.add_argument("--profile", type=Path, help="also write the times of the base's kernels there")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "throughput.json", help="where the numbers go")
    chosen = parser.parse_args(arguments)
    usual = ("qwen3-small", 128, 4, 2, 1) if chosen.quick else ("qwen3-0.6b", 4096, 32, 4, 3)
    for name, value in zip(("shape", "tokens", "samples", "micro_batch_size", "rounds"), usual, strict=True):
        if getattr(chosen, name) is None:
            setattr(chosen, name, SHAPES / str(value) if name == "shape" else value)

    import torch

    cuda = torch.cuda.is_available()
    devices = torch.cuda.device_count() if cuda else 2
    todo = cases(chosen, devices, cuda)
    if not todo:
        parser.error(f"no layout of {chosen.layout or [name for name, _, _ in LAYOUTS]} fits {devices} devices")
    about = circumstances("throughput", arguments, ("triton", *chosen.against)) | {
        "model": chosen.shape.name, "tokens": str(chosen.tokens), "samples per data-parallel rank": str(chosen.samples),
        "micro-batch size": str(chosen.micro_batch_size), "rounds": str(chosen.rounds),
    }  # fmt: skip
    for name, value in about.items():
        print(f"{name}: {value}")
    print("\n".join(HEAD), flush=True)
    rows = [row for case in todo for row in measure(case)]
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps({"about": about, "rows": [asdict(row) for row in rows]}, indent=1))
    print(f"numbers in {chosen.out}")
    return 1 if any(row.problem for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
