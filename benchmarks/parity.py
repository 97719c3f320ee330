"""Every layout against one rank: five training steps with equal losses and gradient norms.

    python -m benchmarks.parity                             # everything; within 20 minutes on two CPU cores
    python -m benchmarks.parity --only "TP2 PP2"            # rows whose name contains this
    python -m benchmarks.parity --markdown docs/parity.md   # also write the table as a page

Prints a table, writes build/parity.json, and exits with 1 if a row differs from its reference by more than ``--tolerance``
(relative, in any of the five losses and norms) or did not finish. In float32, on the CPU.

A row is a layout, of a full model or with LoRA adapters, run in one of three ways:

    engine     the engine alone, in processes that go through all layouts of their number of ranks
    local      ``everstep train ... launcher=local``: torchrun and the whole step transaction
    ray        the same, ``launcher=ray``

The reference of the engine's rows is the engine on one rank, that of the launchers' rows a run on one rank under torchrun.
Left out on purpose: speed (the models are tiny) and bfloat16 (its rounding would hide a wrong layer).
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing as mp
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.circumstances import ROOT, circumstances, environment
from everstep.layout import Layout

STEPS, LAYERS, VOCABULARY, LR = 5, 8, 101, 1e-3  # an odd vocabulary: it must be padded to be cut
LORA = {"rank": 4, "alpha": 8.0}
EXPERTS: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True, "mlp_only_layers": [1],
    "output_router_logits": True, "router_aux_loss_coef": 0.02,
}  # fmt: skip
WORLD_DEADLINE_S, RUN_DEADLINE_S = 900.0, 240.0


@dataclass(frozen=True)
class Row:
    name: str
    layout: dict[str, Any]
    engine: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    how: str = "engine"
    moe: bool = False
    packed: bool = False
    aux: bool = True  # with the experts' auxiliary loss, which is one of a micro-batch: packing cuts other micro-batches

    @property
    def reference(self) -> tuple[bool, bool, bool, bool]:
        """What its reference is of: the one-rank row that has the same."""
        return self.how == "engine", self.lora, self.moe, self.aux

    @property
    def ranks(self) -> int:
        return Layout(**self._sizes).ranks_per_replica

    @property
    def _sizes(self) -> dict[str, Any]:
        return {k: tuple(v) if isinstance(v, list) else v for k, v in self.layout.items()}

    @property
    def full_name(self) -> str:
        return f"{self.how} {self.model}{'LoRA' if self.lora else 'full'} {self.name}"

    @property
    def model(self) -> str:
        return ("MoE " if self.aux else "MoE without auxiliary loss ") if self.moe else ""


@dataclass
class Outcome:
    row: Row
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    seconds: float = 0.0
    problem: str = ""
    error: float = float("inf")  # largest relative difference from the reference


SP, NOT_SHARDED = {"sequence_parallel": True}, {"distributed_optimizer": False}
FULL, SELECTIVE = {"recompute": "full"}, {"recompute": "selective"}
#: (name, layout, engine); the distributed optimizer is on unless the name says otherwise.
ENGINE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("1 rank, recompute full", {}, FULL),
    ("1 rank, recompute selective, plain optimizer", {}, SELECTIVE | NOT_SHARDED),
    ("TP2", {"tp": 2}, {}),
    ("TP2 SP", {"tp": 2}, SP),
    ("TP2 SP, recompute full", {"tp": 2}, SP | FULL),
    ("PP2", {"pp": 2}, {}),
    ("PP2, recompute full", {"pp": 2}, FULL),
    ("PP2, layers 5+3", {"pp": 2, "layers_per_stage": [5, 3]}, {}),
    ("PP2 VPP2", {"pp": 2, "vpp": 2}, {}),
    ("PP2 VPP4, recompute full", {"pp": 2, "vpp": 4}, FULL),
    ("CP2", {"cp": 2}, {}),
    ("CP2, recompute selective", {"cp": 2}, SELECTIVE),
    ("DP2", {"dp": 2}, {}),
    ("DP2, plain optimizer", {"dp": 2}, NOT_SHARDED),
    ("TP4 SP", {"tp": 4}, SP),
    ("TP2 PP2", {"tp": 2, "pp": 2}, {}),
    ("TP2 SP PP2 VPP2", {"tp": 2, "pp": 2, "vpp": 2}, SP),
    ("PP4", {"pp": 4}, {}),
    ("PP4 VPP2", {"pp": 4, "vpp": 2}, {}),
    ("CP4", {"cp": 4}, {}),
    ("CP2 TP2 SP", {"cp": 2, "tp": 2}, SP),
    ("CP2 PP2", {"cp": 2, "pp": 2}, {}),
    ("CP2 DP2", {"cp": 2, "dp": 2}, {}),
    ("DP2 TP2", {"dp": 2, "tp": 2}, {}),
    ("DP2 PP2", {"dp": 2, "pp": 2}, {}),
    ("DP4", {"dp": 4}, {}),
    ("DP2 TP2 PP2", {"dp": 2, "tp": 2, "pp": 2}, {}),
    ("CP2 TP2 SP PP2 VPP2", {"cp": 2, "tp": 2, "pp": 2, "vpp": 2}, SP),
    ("CP2 DP2 PP2, plain optimizer", {"cp": 2, "dp": 2, "pp": 2}, NOT_SHARDED),
]
MOE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("1 rank, recompute full", {}, FULL),
    ("TP2 SP", {"tp": 2}, SP),
    ("PP2 VPP2, recompute selective", {"pp": 2, "vpp": 2}, SELECTIVE),
    ("DP2 EP2", {"dp": 2, "ep": 2}, {}),
    ("DP2 EP2, plain optimizer", {"dp": 2, "ep": 2}, NOT_SHARDED),
    ("DP2 EP2, recompute full", {"dp": 2, "ep": 2}, FULL),
    ("DP2 EP2, recompute selective", {"dp": 2, "ep": 2}, SELECTIVE),
    ("CP2 EP2", {"cp": 2, "ep": 2}, {}),
    ("DP4 EP4", {"dp": 4, "ep": 4}, {}),
    ("DP4 EP2", {"dp": 4, "ep": 2}, {}),
    ("DP4 EP2, plain optimizer", {"dp": 4, "ep": 2}, NOT_SHARDED),
    ("DP2 EP2 TP2 SP", {"dp": 2, "ep": 2, "tp": 2}, SP),
    ("DP2 EP2 PP2", {"dp": 2, "ep": 2, "pp": 2}, {}),
    ("DP2 EP2 PP2 VPP2", {"dp": 2, "ep": 2, "pp": 2, "vpp": 2}, {}),
    ("CP2 DP2 EP4", {"cp": 2, "dp": 2, "ep": 4}, {}),
    ("CP2 EP2 TP2 SP", {"cp": 2, "ep": 2, "tp": 2}, SP),
    ("DP2 EP2 TP2 SP PP2", {"dp": 2, "ep": 2, "tp": 2, "pp": 2}, SP),
    ("DP4 EP2 PP2, recompute full, plain optimizer", {"dp": 4, "ep": 2, "pp": 2}, FULL | NOT_SHARDED),
]
CHUNKS = {"logprob_chunk_tokens": 7}
#: The same, with samples packed into rows, or logits chunk by chunk, or both.
PACKED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("1 rank", {}, {}),
    ("1 rank, recompute full", {}, FULL),
    ("TP2 SP", {"tp": 2}, SP),
    ("PP2 VPP2", {"pp": 2, "vpp": 2}, {}),
    ("CP2", {"cp": 2}, {}),
    ("CP2, recompute selective, chunks of 7", {"cp": 2}, SELECTIVE | CHUNKS),
    ("DP2", {"dp": 2}, {}),
    ("TP2 PP2, chunks of 7", {"tp": 2, "pp": 2}, CHUNKS),
    ("CP2 DP2", {"cp": 2, "dp": 2}, {}),
    ("CP2 TP2 SP PP2 VPP2, chunks of 7", {"cp": 2, "tp": 2, "pp": 2, "vpp": 2}, SP | CHUNKS),
]
CHUNKED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("1 rank, chunks of 7", {}, CHUNKS),
    ("TP2, chunks of 7", {"tp": 2}, CHUNKS),
    ("TP2 SP, recompute full, chunks of 7", {"tp": 2}, SP | FULL | CHUNKS),
    ("PP2, chunks of 7", {"pp": 2}, CHUNKS),
]
LAUNCHED: list[tuple[str, dict[str, Any]]] = [
    ("TP2 PP2", {"tp": 2, "pp": 2}),
    ("PP4", {"pp": 4}),
    ("TP2", {"tp": 2}),
    ("PP2", {"pp": 2}),
    ("DP2 TP2 PP2", {"dp": 2, "tp": 2, "pp": 2}),
]
LAUNCHED_MOE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("DP2 EP2", {"dp": 2, "ep": 2}, {}),
    ("DP2 EP2 TP2 SP", {"dp": 2, "ep": 2, "tp": 2}, SP),
    ("DP2 EP2 PP2", {"dp": 2, "ep": 2, "pp": 2}, {}),
]


def all_rows() -> list[Row]:
    rows = [Row(name, layout, engine, lora) for lora in (False, True) for name, layout, engine in ENGINE + CHUNKED]
    rows += [Row(f"packed {n}", layout, engine, lora, packed=True) for lora in (False, True) for n, layout, engine in PACKED]
    rows += [Row(name, layout, engine, moe=True) for name, layout, engine in MOE]
    rows += [Row(name, layout, engine, lora=True, moe=True) for name, layout, engine in MOE if name in ("DP2 EP2", "DP2 EP2 TP2 SP PP2")]
    rows += [Row("packed DP2 EP2 TP2 SP", {"dp": 2, "ep": 2, "tp": 2}, SP, moe=True, packed=True, aux=False)]
    ways = [(lora, how) for lora in (False, True) for how in ("local", "ray")]
    rows += [Row(name, layout, {}, lora, how) for lora, how in ways for name, layout in LAUNCHED]
    rows += [Row("packed DP2 TP2 PP2", {"dp": 2, "tp": 2, "pp": 2}, {}, lora, how, packed=True) for lora, how in ways]
    return rows + [Row(name, layout, engine, how=how, moe=True) for how in ("local", "ray") for name, layout, engine in LAUNCHED_MOE]


# ------------------------------------------------------------------ the engine alone


def batches(step: int) -> list[Any]:
    """Micro-batches of different sizes and widths, right-padded; every second token counts in the loss."""
    import torch

    from everstep.cluster.batch import TrainingBatch

    made = []
    for number, (samples, tokens) in enumerate([(2, 19), (1, 26), (2, 14), (3, 9), (1, 22), (2, 11)]):
        generator = torch.Generator().manual_seed(100 * step + number)
        ids = torch.randint(0, VOCABULARY, (samples, tokens), generator=generator)
        lengths = torch.randint(tokens // 2, tokens + 1, (samples,), generator=generator)
        attention = (torch.arange(tokens)[None] < lengths[:, None]).long()
        counted = attention * (torch.arange(tokens)[None] % 2)
        made.append(
            TrainingBatch(
                {"input_ids": ids * attention, "attention_mask": attention, "loss_mask": counted.float()},
                sample_ids=[f"{step}/{number}/{i}" for i in range(samples)],
            )
        )
    return made


def train(row: Row, rank: int) -> tuple[list[float], list[float]]:
    """(losses, gradient norms) of five steps of the engine; the replica's world exists."""
    import torch
    from transformers import Qwen3Config, Qwen3MoeConfig

    from everstep.cluster.batch import TrainingBatch
    from everstep.cluster.slots import cut_slots
    from everstep.config.schema import Config
    from everstep.engine.loss import LossSpec
    from everstep.engine.step import Engine

    sizes: dict[str, Any] = dict(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=4, head_dim=16, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.1,
    )  # fmt: skip
    model = Qwen3MoeConfig(**sizes, **EXPERTS) if row.moe else Qwen3Config(**sizes)
    config = Config(
        recipe="sft", model={"path": "unused"}, data={"source": "unused"}, engine=row.engine, lora=LORA if row.lora else {},
        train={"tokens_per_micro_batch": 40} if row.packed else {}, moe={} if row.aux else {"aux_loss_coef": 0.0},
    )  # fmt: skip
    layout = Layout(**row._sizes)
    engine = Engine(config, model, layout.position(rank), layout, torch.device("cpu"))
    engine.init_random(1)
    loss, dp = LossSpec("everstep.rl.losses:sft_loss").build(), layout.position(rank).dp
    losses, norms = [], []
    for step in range(STEPS):
        mine = batches(step)[dp :: layout.dp]
        if row.packed:
            mine = [slot[dp] for slot in cut_slots(TrainingBatch.concat(batches(step)), config.train, layout.dp)]
        weight, total = engine.accumulate(mine, loss, [0] * len(mine))[:2].tolist()
        norm = engine.squared_norm(engine.gradients()) ** 0.5 / weight
        engine.apply(engine.gradients(), min(1.0, 1.0 / norm) / weight, LR)
        losses.append(total / weight)
        norms.append(norm)
    engine.close()
    return losses, norms


def worker(rank: int, ranks: int, port: int, rows: list[Row], path: Path) -> None:
    """One of the processes that go through ``rows``, all of ``ranks`` ranks; rank 0 writes a line after each."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    for number, row in enumerate(rows):
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(str(number), store), rank=rank, world_size=ranks, timeout=timeout
        )
        start = time.monotonic()
        losses, norms = train(row, rank)
        if rank == 0:
            with path.open("a") as file:
                file.write(json.dumps([row.full_name, losses, norms, time.monotonic() - start]) + "\n")
    os._exit(0)  # groups may wait for each other in their destructors


def run_engine(rows: Sequence[Row], folder: Path) -> Iterator[Outcome]:
    """All engine rows of one number of ranks, in processes that they share."""
    import torch.distributed as dist

    ranks = rows[0].ranks
    path = folder / f"engine-{ranks}.jsonl"
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("spawn")
    os.environ.update(OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")  # read by the processes when they start
    processes = [
        context.Process(target=worker, args=(rank, ranks, store.port, list(rows), path)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + WORLD_DEADLINE_S
    while any(p.exitcode is None for p in processes) and all(not p.exitcode for p in processes) and time.monotonic() < end:
        time.sleep(0.05)
    problem = "another row ended the processes" if any(p.exitcode for p in processes) else "not done in time"
    for process in processes:
        process.kill()
        process.join()
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {name: (losses, norms, seconds) for name, losses, norms, seconds in lines}
    for row in rows:
        if row.full_name in done:
            yield Outcome(row, *done[row.full_name])
        else:
            yield Outcome(row, problem=problem)
            problem = "not reached"


# ------------------------------------------------------------------ through the launchers


def _model_of(moe: bool) -> str:
    return "tiny-qwen3-moe" if moe else "tiny-qwen3"


def make_models(folder: Path) -> None:
    """The models of the examples, with as many layers as the rows need, in ``folder``."""
    for moe in (False, True):
        model = folder / _model_of(moe)
        shutil.copytree(ROOT / "examples" / "models" / model.name, model)
        settings = json.loads((model / "config.json").read_text())
        settings |= {"num_hidden_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS, "initializer_range": 0.1}
        (model / "config.json").write_text(json.dumps(settings))


def run_launched(row: Row, folder: Path) -> Outcome:
    """``everstep train`` as a user calls it; numbers from the metrics of its run."""
    model, run = folder / _model_of(row.moe), folder / row.full_name.replace(" ", "-")
    overrides = [
        f"model.path={model}", f"run_dir={run}", f"launcher={row.how}", "device=cpu", "layout.replicas=1", f"sft.steps={STEPS}",
        "sft.samples_per_step=24", "train.micro_batch_size=" + ("null" if row.packed else "4"), "optimizer.schedule=constant", "optimizer.warmup_steps=0",
        f"optimizer.lr={LR}", "checkpoint.at_end=false", "telemetry.progress=none", "telemetry.tensorboard=false",
        *(["train.tokens_per_micro_batch=160"] if row.packed else []),
        *(f"layout.{key}={value}" for key, value in row.layout.items()),
        *(f"engine.{key}={str(value).lower()}" for key, value in row.engine.items()),
        *(f"lora.{key}={value}" for key, value in LORA.items() if row.lora),
    ]  # fmt: skip
    start = time.monotonic()
    command = [sys.executable, "-m", "everstep", "train", "examples/sft_chat.yaml", *overrides]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_DEADLINE_S, env=environment())
    except subprocess.TimeoutExpired:
        return Outcome(row, problem=f"not done in {RUN_DEADLINE_S:g} s")
    if done.returncode:
        return Outcome(row, problem=(done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses, norms = ([line[f"train/{name}"] for line in metrics] for name in ("loss", "grad_norm"))
    return Outcome(row, losses, norms, time.monotonic() - start)


# ------------------------------------------------------------------ comparing and showing


def compare(outcome: Outcome, reference: Outcome, tolerance: float) -> None:
    """Fill in ``error``, and ``problem`` if it is more than ``tolerance``."""
    if outcome.problem:
        return
    got, wanted = outcome.losses + outcome.norms, reference.losses + reference.norms
    if len(got) != len(wanted) or len(wanted) != 2 * STEPS:
        outcome.problem = f"{len(got)} numbers, the reference has {len(wanted)}, {2 * STEPS} are expected"
        return
    errors = [abs(a - b) / abs(b) for a, b in zip(got, wanted, strict=True)]
    outcome.error = next((error for error in errors if error != error), max(errors))  # max() may pass a NaN over
    if not outcome.error <= tolerance:
        outcome.problem = f"differs from one rank by {outcome.error:.1e}"


def measure(rows: Sequence[Row], tolerance: float, side_by_side: int) -> list[Outcome]:
    """Run ``rows`` and their references: ``side_by_side`` runs at a time, since one that starts (imports, Ray) uses one core."""
    kinds = sorted({row.reference for row in rows})
    rows = [Row("1 rank", {}, {}, lora, "engine" if alone else "local", moe, aux=aux) for alone, lora, moe, aux in kinds] + list(rows)
    engine, launched = ([row for row in rows if (row.how == "engine") == alone] for alone in (True, False))
    with tempfile.TemporaryDirectory(prefix="everstep-parity-") as name, ThreadPoolExecutor(side_by_side) as pool:
        folder = Path(name)
        if launched:
            make_models(folder)
        jobs = [pool.submit(lambda these: list(run_engine(these, folder)), [row for row in engine if row.ranks == ranks])
                for ranks in sorted({row.ranks for row in engine})]  # fmt: skip
        jobs += [pool.submit(lambda row: [run_launched(row, folder)], row) for row in launched]
        outcomes: list[Outcome] = []
        for job in jobs:
            for outcome in job.result():
                print(f"{outcome.row.full_name:60} {outcome.problem or 'done'} ({outcome.seconds:.1f} s)", flush=True)
                outcomes.append(outcome)
    references = {outcome.row.reference: outcome for outcome in outcomes if outcome.row.name == "1 rank"}
    for outcome in outcomes:
        compare(outcome, references[outcome.row.reference], tolerance)
    return outcomes


def table(outcomes: Sequence[Outcome]) -> list[str]:
    lines = ["| run by | layout | ranks | trained | loss, step 5 | norm, step 5 | largest difference | |", "|---|---|--:|---|--:|--:|--:|---|"]
    for o in outcomes:
        numbers = [f"{o.losses[-1]:.6f}", f"{o.norms[-1]:.6f}", f"{o.error:.1e}"] if o.losses and o.norms else ["", "", ""]
        what = "reference" if o.row.name == "1 rank" and not o.problem else o.problem or "equal"
        trained = o.row.model + ("LoRA" if o.row.lora else "full")
        lines.append(f"| {o.row.how} | {o.row.name} | {o.row.ranks} | {trained} | {' | '.join(numbers)} | {what} |")
    return lines


PAGE = """# Layouts against one rank

Five training steps in float32 of a small Qwen3 model (8 layers) in every layout, of the whole model and with LoRA adapters
on all matrices. Each of the five losses and five gradient norms must equal those of one rank to {tolerance:g} relative;
the table has the largest difference of the ten. `engine`: the engine alone, distributed optimizer unless it says plain;
`local`, `ray`: the whole of `everstep train` under that launcher. Packed: samples of different lengths in rows of a token
budget, without padding; their reference is not packed. Chunks of 7: logits of 7 tokens at a time. TP tensor, SP sequence, PP pipeline,
VPP chunks per pipeline rank, CP context, DP inner data, EP expert parallelism. MoE: a Qwen3-MoE model (8 experts, 3 or 2 of which take a
token, one of the engine's 8 layers dense) with an auxiliary loss, which is part of the norms; packed without one, since it is a micro-batch's.

Measured {date} on {machine}, with {versions}, in {seconds} s
(load average at the end {load}), by `{command}`, which ends with an error if a row differs.

{rows}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose full name, such as `engine LoRA TP2 PP2`, contains this")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest relative difference allowed")
    parser.add_argument("--side-by-side", type=int, default=2, help="runs at a time; the deadlines are for as many as there are cores")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "parity.json", help="where the numbers go")
    parser.add_argument("--markdown", type=Path, help="also write the table as a page")
    chosen = parser.parse_args(arguments)
    rows = [row for row in all_rows() if chosen.only in row.full_name]
    if not rows:
        parser.error(f"no row contains {chosen.only!r}; they are: {', '.join(row.full_name for row in all_rows())}")
    if chosen.side_by_side < 1:
        parser.error("--side-by-side is at least 1")
    start = time.monotonic()
    outcomes = measure(rows, chosen.tolerance, chosen.side_by_side)
    about = circumstances("parity", arguments) | {"seconds": f"{time.monotonic() - start:.0f}"}
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps({"about": about, "tolerance": chosen.tolerance, "rows": [asdict(o) for o in outcomes]}, indent=1))
    shown = "\n".join(table(outcomes))
    print(shown)
    if chosen.markdown:
        chosen.markdown.write_text(PAGE.format(rows=shown, tolerance=chosen.tolerance, **about))
    bad = [outcome for outcome in outcomes if outcome.problem]
    print(f"{len(outcomes) - len(bad)} of {len(outcomes)} rows are equal, {about['seconds']} s; numbers in {chosen.out}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
