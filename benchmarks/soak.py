"""Random faults, run after run, until enough of them have happened; after each run the history checker, and the bits.

    python -m benchmarks.soak --faults 200 --seed 1
    python -m benchmarks.soak --faults 200 --seed 1 --run 17     only run 17 of that soak, again
    python -m benchmarks.soak --faults 40 --shape "2 replicas x tp 2 pp 2"

Every run is one of ``everstep train``: its recipe, controller, coordinator and workers, in real processes that are forked from one
which has done the imports. What is run and what strikes it is a function of (seed, number of the run, --shape) alone: the layout (replicas
of one rank, of two by tensor, pipeline, context or data parallelism, of four by two of them), the mode of recovery, exact or not, and a schedule as ``everstep
chaos`` draws it. *When* within a phase a signal comes is up to the machine.

A violation is: an invariant that the checker finds broken, a run that does not end (this ends the soak), a process left behind, somebody dead whom nobody
struck, or, in exact mode, final weights that differ in a bit from those of a run in which nobody died. Exit code 1 if there is any.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.circumstances import ROOT, circumstances
from everstep import driver
from everstep.chaos import with_schedule
from everstep.cluster.forked import ForkedHost
from everstep.cluster.processes import still_running
from everstep.config.load import load_config
from everstep.config.schema import Config
from everstep.errors import EverstepError, Interrupted
from everstep.recovery.faults import describe
from everstep.telemetry.events import Event, of_kind, read_events
from everstep.telemetry.history import check

STEPS = 40
RATE = 0.2  # faults a step, before what is survived limits them
KINDS = ("kill", "kill", "kill", "kill", "stop", "exit", "segv", "gil", "hang", "oom", "nan", "partition")  # some more often
SHAPES: dict[str, tuple[str, ...]] = {
    "3 replicas": ("layout.replicas=3", "layout.spares=4"),
    "4 replicas": ("layout.replicas=4", "layout.spares=2"),
    "2 replicas, both needed": ("layout.replicas=2", "layout.spares=5", "recovery.min_replicas=2"),
    "2 replicas x tp 2": ("layout.replicas=2", "layout.tp=2", "engine.sequence_parallel=true", "layout.spares=3"),
    "2 replicas x pp 2": ("layout.replicas=2", "layout.pp=2", "layout.spares=3"),
    "2 replicas x cp 2": ("layout.replicas=2", "layout.cp=2", "layout.spares=3"),
    "2 replicas x dp 2": ("layout.replicas=2", "layout.dp=2", "layout.spares=3", "train.micro_batch_size=2"),
    "2 replicas x tp 2 pp 2": ("layout.replicas=2", "layout.tp=2", "layout.pp=2", "engine.sequence_parallel=true", "layout.spares=4",
                               "recovery.silence_s=5", "recovery.progress_timeout_s=8"),  # of eight ranks each gets a CPU less often
}
OFTEN = ("3 replicas", "3 replicas", "3 replicas", "4 replicas", "4 replicas", "2 replicas, both needed")  # these are quick
MODES: dict[str, tuple[str, ...]] = {
    "exact salvage": ("recovery.exact=true",),
    "exact retry": ("recovery.exact=true", "recovery.mode=retry"),
    "salvage": (),
    "wait": ("recovery.mode=wait",),
}
GONE_S = 15.0
RUN_S = 900.0  # far above any run, and above the sum of the deadlines that a stuck one would meet


@dataclass
class Result:
    """One run. ``kinds``: faults that happened, by kind and phase."""

    number: int
    shape: str
    mode: str
    faults: int = 0
    deaths: int = 0
    unfired: int = 0
    seconds: float = 0.0
    compared: bool = False  # the final bits with those of an undisturbed run
    kinds: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    warnings.filterwarnings("ignore", module=r"torch|megatron|transformers")  # advice to developers of those
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="everstep-soak-") as made:
        folder = Path(args.runs or made)
        number = args.run if args.run is not None else 0
        while sum(r.faults for r in results) < args.faults:
            result = one_run(args.seed, number, folder, args.shape)
            results.append(result)
            bits = "bits equal" if result.compared else "bits not compared"
            print(f"run {number:>3}  {result.shape:<24} {result.mode:<14} {result.faults:>3} faults {result.deaths:>3} deaths "
                  f"{result.seconds:>6.1f} s  {bits}{''.join(f'{chr(10)}    VIOLATION {v}' for v in result.violations)}", flush=True)
            if result.violations and not args.runs:  # to look at: a second try need not show it again
                print(f"    kept in {shutil.copytree(folder / f'run-{number}', Path(tempfile.mkdtemp(prefix='everstep-soak-')) / f'run-{number}')}", flush=True)
            number += 1
            if args.run is not None:
                break
    violations = sum(len(r.violations) for r in results)
    kinds = Counter[str]()
    for result in results:
        kinds.update(result.kinds)
    print("  ".join(f"{kind}: {count}" for kind, count in sorted(kinds.items())))
    print(f"{len(results)} runs, {sum(r.faults for r in results)} faults, {sum(r.deaths for r in results)} deaths, "
          f"{sum(r.compared for r in results)} runs with their bits compared, {violations} violations")
    if args.out:
        report = {"about": circumstances("soak", arguments), "runs": [asdict(r) for r in results]}
        Path(args.out).write_text(json.dumps(report, indent=1))
    return 1 if violations else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=int, help="only this one")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="only runs of this layout")
    parser.add_argument("--runs", help="keep the run folders here")
    parser.add_argument("--out", help="JSON file")
    args = parser.parse_args(arguments)
    if args.faults < 1:
        parser.error(f"--faults {args.faults} must be at least 1")
    return args


def plan(seed: int, number: int, folder: Path, only: str | None = None) -> tuple[str, str, Config]:
    """(shape, mode, configuration with its schedule) of one run."""
    rng = random.Random(f"soak {seed} {number}")
    mode = rng.choice(sorted(MODES))
    shape = only or rng.choice([*OFTEN, *sorted(SHAPES)])
    config = _config(folder / f"run-{number}", *SHAPES[shape], *MODES[mode])
    kinds = sorted({rng.choice(KINDS) for _ in range(5)} | {"kill"})
    return shape, mode, with_schedule(config, rng.randrange(1 << 30), RATE, kinds, reckless=False)


def _config(folder: Path, *overrides: str) -> Config:
    return load_config(str(ROOT / "examples" / "sft_text.yaml"), [
        "device=cpu", f"model.path={ROOT / 'examples' / 'models' / 'tiny-qwen3'}", "telemetry.progress=none", "telemetry.tensorboard=false",
        f"run_dir={folder}", f"sft.steps={STEPS}", "train.micro_batch_size=4", "sft.samples_per_step=32", "train.verify_every=10",
        "checkpoint.every_steps=25", "recovery.heartbeat_s=0.2", "recovery.silence_s=2.5", "recovery.progress_timeout_s=3", "recovery.fence_s=5",
        "recovery.step_timeout_s=60", "recovery.heal_timeout_s=12", "recovery.reform_timeout_s=60", "recovery.link_timeout_s=15", *overrides,
    ])  # fmt: skip


def one_run(seed: int, number: int, folder: Path, only: str | None = None) -> Result:
    shape, mode, config = plan(seed, number, folder, only)
    result = Result(number, shape, mode)
    start = time.monotonic()
    failure = _train(config)
    result.seconds = time.monotonic() - start
    where = Path(config.run_dir)
    events = read_events(where / "events")
    fired = of_kind(events, "fault")
    result.faults, result.unfired = len(fired), len(config.faults) - len(fired)
    result.kinds = dict(Counter(f"{f['kind']} in {f['phase']}" for f in fired))
    deaths = of_kind(events, "death")
    result.deaths = len(deaths)
    told = "\n      ".join(describe(f) for f in config.faults)
    if failure:
        result.violations.append(f"the run ended: {failure}\n      {told}")
    result.violations += [f"invariant {f.number}: {f.counterexample}\n      {told}" for f in check(where) if f.held is False]
    struck = {f["worker"] for f in fired if f["kind"] != "nan"}
    for death in deaths:
        if death["worker"] not in struck:
            result.violations.append(f"{death['worker']} died in step {death.step}, and nobody struck it: {death['cause']}\n      {told}")
    if left := still_running({e.pid for e in events if e.who != "lead"}, GONE_S):
        result.violations.append(f"processes {left} were left behind")
    if not failure and config.recovery.exact:
        result.compared = True
        if final_bits(events) != undisturbed(shape, folder):
            result.violations.append(f"the final bits are not those of an undisturbed run\n      {told}")
    return result


@functools.cache
def undisturbed(shape: str, folder: Path) -> dict[str, str]:
    """Final hashes by position without a fault, on one replica."""
    config = _config(folder / f"calm-{sorted(SHAPES).index(shape)}", *SHAPES[shape], "recovery.exact=true", "layout.replicas=1", "layout.spares=0",
                     "recovery.min_replicas=1")
    if failure := _train(config):
        raise SystemExit(f"the undisturbed run of {shape} failed: {failure}")
    return final_bits(read_events(Path(config.run_dir) / "events"))


def final_bits(events: Sequence[Event]) -> dict[str, str]:
    """Hashes by position, of the last comparison of all ranks."""
    return {name.split("/")[1]: digest for name, digest in of_kind(events, "verify")[-1]["hashes"].items()}


def _train(config: Config) -> EverstepError | None:
    # A run that does not end ends the soak: where all threads stand goes to stderr, and the exit code is 1.
    faulthandler.dump_traceback_later(RUN_S, exit=True, file=sys.__stderr__ or 2)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            driver.run(config, host=ForkedHost)
    except Interrupted:
        raise
    except EverstepError as error:
        return error
    finally:
        faulthandler.cancel_dump_traceback_later()
    return None


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
