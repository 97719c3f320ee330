"""``everstep chaos``: train under a random fault schedule, then prove from the logs that nothing was lost."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TextIO

from everstep import driver
from everstep.checkpoint.storage import local_folder
from everstep.cluster.environment import detect_launcher
from everstep.config.check import check_plan
from everstep.config.schema import Config
from everstep.errors import BadInput, EverstepError, InvariantViolated
from everstep.recovery.chaos import budget, draw, parse_kinds
from everstep.recovery.faults import describe
from everstep.rl.pipeline import fault_phases
from everstep.telemetry.history import check as check_history
from everstep.telemetry.history import print_findings, worst


def with_schedule(config: Config, seed: int, rate: float, kinds: Sequence[str], reckless: bool) -> Config:
    """``config`` with the drawn schedule in place of its own faults. BadInput."""
    if detect_launcher(config) == "local":
        raise BadInput("chaos needs replicas that survive one another: use launcher=ray (launcher=local is one replica)")
    planned = config.model_copy(update={"faults": draw(config, seed, rate, kinds, reckless, sorted(fault_phases(config)))})
    check_plan(planned, os.environ)
    return planned


def run(config: Config, seed: int, rate: float, kinds: str, reckless: bool, clean: bool, out: TextIO) -> int:
    """Print the schedule, run, check the history. Returns 0; raises what ended the run, InvariantViolated before anything else."""
    planned = with_schedule(config, seed, rate, parse_kinds(kinds, reckless), reckless)
    print(f"chaos: seed {seed}, {len(planned.faults)} faults; {budget(config)} deaths can be survived", file=out)
    for fault in planned.faults:
        print(f"  {describe(fault)}", file=out)
    out.flush()
    failure: EverstepError | None = None
    try:
        driver.run(planned, clean=clean)
    except BadInput:
        raise
    except EverstepError as error:
        failure = error
    findings = check_history(local_folder(config.run_dir))
    print_findings(findings, out)
    if worst(findings):
        broken = ", ".join(str(finding.number) for finding in findings if finding.held is False)
        raise InvariantViolated(
            f"{config.run_dir}: invariants {broken} do not hold (above); repeat with --seed {seed}" + (f"; the run ended with: {failure}" if failure else "")
        ) from failure
    if failure:
        raise failure
    return 0
