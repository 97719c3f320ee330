"""From a configuration to a running group: what ``everstep train`` does, importable.

    import everstep
    group = everstep.launch("config.yaml")       # a group of replicas
    group.call("mesh", "logprobs", batch)        # any public worker method, through any dispatch
    group.close()

    everstep.run(config)                         # a whole run of config.recipe
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from everstep import attempt
from everstep.checkpoint import flushed
from everstep.checkpoint.choose import Chosen
from everstep.checkpoint.manifest import pointed_at, step_of
from everstep.cluster import environment
from everstep.cluster.group import Group
from everstep.cluster.host import Host
from everstep.cluster.local import torchrun
from everstep.config import derive
from everstep.config import load as config_files
from everstep.config.check import check
from everstep.config.schema import Config
from everstep.data import PreparedData
from everstep.data import check as check_data
from everstep.errors import (
    BadInput,
    BelowMinimum,
    ConfigError,
    EverstepError,
    Interrupted,
    InvariantViolated,
    RolledBack,
)
from everstep.recipes import dpo, grpo, ppo, sft
from everstep.recipes.run import Run
from everstep.recovery import rendezvous
from everstep.recovery.commitlog import CommitLog
from everstep.recovery.view import Kind, Record
from everstep.run_dir import RunDir, check_run_dir, checkpoints_of, open_run_dir, starting
from everstep.telemetry import logs
from everstep.telemetry.console import Console
from everstep.telemetry.events import EventLog, read_events
from everstep.telemetry.metrics import Metrics
from everstep.telemetry.ongoing import Ongoing
from everstep.telemetry.recoveries import account, recoveries
from everstep.telemetry.report import reward_curve, summary_table
from everstep.telemetry.trackers import open_trackers
from everstep.telemetry.watching import Watching

if TYPE_CHECKING:
    from everstep.cluster.local.group import Entry

RECIPES = {"sft": sft.train, "grpo": grpo.train, "ppo": ppo.train, "dpo": dpo.train}


def launch(config: Config | str | os.PathLike[str], overrides: Sequence[str] = (), clean: bool = False) -> Group:
    """Start the processes of ``config`` (or of a file with ``overrides``) and return the group; the caller closes it.

    With ``resume`` the group continues from the checkpoint that was chosen; ``group.recipe_state`` is what was saved with it.
    Raises BadInput before any process is started. With ``launcher=local`` the caller is a rank of torchrun and every rank
    makes the same calls.
    """
    _quiet_libraries()
    if not isinstance(config, Config):
        config = config_files.load_config(os.fspath(config), overrides)
    config = environment.placed(config)
    check(config)
    launcher = environment.detect_launcher(config)
    if launcher == "ray":
        check_run_dir(config, clean)
    config = logs.with_environment(config, os.environ)
    watching = Watching(config)
    try:
        run_dir, chosen, events, entry = _enter(config, clean, launcher, watching)
        group = _start_group(config, launcher, run_dir, events, None, entry)
    except BaseException:  # Ctrl-C, too: nothing that watches outlives a start that failed
        watching.close()
        raise
    group.closing.callback(watching.close)
    if group.is_lead and config.replica.id is None:  # else the lighthouse does
        watching.follow(run_dir, group.status, group.address)
    if chosen.path:
        try:
            group.load(chosen.path)
        except BaseException:  # Ctrl-C, too: ranks are not left behind
            group.close("failed")
            raise
    return group


def run(
    config: Config, *, program: Sequence[str] = (), clean: bool = False, host: Callable[[Config], Host] | None = None,
    attach: bool = False,
) -> int:
    """Run ``config.recipe`` from start (or checkpoint) to end; returns 0. Raises EverstepError.

    ``attach``: take over the workers of a controller of this run that was killed, and go on after the last committed step.

    ``program``: the command that torchrun shall start on every rank, for ``launcher=local`` outside torchrun. ``host``: makes what
    starts the workers, in the place of Ray.
    """
    _quiet_libraries()
    config = environment.placed(config)
    launcher = environment.detect_launcher(config)
    inside = environment.inside_torchrun()
    if launcher == "ray" or not inside or os.environ.get("RANK") == "0":
        check(config)
        if attach:
            check_attach(config, clean, launcher)
        elif config.replica.id is None:  # else the lighthouse looks: only it knows whether the run goes on
            check_run_dir(config, clean)
    config = logs.with_environment(config, os.environ)
    if launcher == "local" and not inside:
        check_data(config)
        with starting(config) if config.replica.id is None else contextlib.nullcontext():  # else the lighthouse prepares it, maybe elsewhere
            return torchrun.launch(config, program, lambda text: print(f"everstep: {text}", file=sys.stderr))
    with _Interrupts() as interrupts:
        return _run(config, check_data(config), launcher, clean, interrupts, host, attach)


def run_replicas(config: Config, program: Sequence[str], clean: bool) -> int:
    """All replicas of ``config`` on this machine, each a torchrun of its own, under a lighthouse; returns 0. Raises EverstepError."""
    from everstep.cluster.local.up import up

    _quiet_libraries()
    if config.launcher == "ray":
        raise ConfigError("launcher=ray: everstep up starts replicas without Ray; leave it out, or use everstep train")
    config = environment.placed(config.model_copy(update={"launcher": "local"}))
    check(config.model_copy(update={"replica": config.replica.model_copy(update={"id": 0})}))
    check_run_dir(config, clean)
    check_data(config)
    with starting(config):
        return up(config, program, lambda text: print(f"everstep: {text}", file=sys.stderr))


def _run(
    config: Config, data: PreparedData, launcher: str, clean: bool, interrupts: _Interrupts, host: Callable[[Config], Host] | None,
    attach: bool,
) -> int:
    watching = Watching(config)
    log: CommitLog | None = None
    entry: Entry | None = None
    events: EventLog | None
    try:
        if attach:
            run_dir, chosen, events, log = _enter_again(config, watching)
        else:
            run_dir, chosen, events, entry = _enter(config, clean, launcher, watching)
    except BaseException:  # Ctrl-C, too: as above
        watching.close()
        raise
    lead = events is not None or (entry is not None and entry.head is not None)  # or may come to be it
    console = Console(config.telemetry.progress, title=config.recipe) if lead else None
    metrics: Metrics | None = None
    own_events = events
    group: Group | None = None
    the_run: Run | None = None
    ongoing = Ongoing()
    status = "failed"
    try:
        if console:
            _introduce(console, config, data, run_dir, chosen, launcher, entry)
        if console and watching.dashboard:
            console.note(f"dashboard: {watching.dashboard}")
        on_record = _follow(console, run_dir, config.layout.replicas, ongoing) if console else None
        group = _start_group(config, launcher, run_dir, events, on_record, entry, host, log)
        if config.checkpoint.on_interrupt:
            interrupts.defer = group.interrupt
        if group.is_lead and config.replica.id is None:  # else the lighthouse does
            window = watching.follow(run_dir, group.status, group.address)
            if console:
                console.note(f"from elsewhere: everstep dashboard {window}")
        track: Callable[[int], Metrics] = lambda step: Metrics(
            run_dir.path, open_trackers(config, run_dir.path, step, _tracker_failed(console, own_events))
        )
        open_metrics: Callable[[int], Metrics] | None = None
        if launcher == "ray":
            metrics = track(group.committed_step if attach else chosen.step)
        elif lead:
            own_events = group.events  # type: ignore[attr-defined]
            open_metrics = lambda step: track(step - 1)
        if chosen.path:
            group.load(chosen.path)
        saved_step = _newest_checkpoint(config) if attach else chosen.step
        while True:
            the_run = Run(config, group, data, console, metrics, own_events, saved_step, ongoing, open_metrics=open_metrics)
            try:
                RECIPES[config.recipe](the_run)
                the_run.finish_saves()
                digest = group.verify()
                the_run.when_done()
                break
            except RolledBack as back:  # the recipe goes on from the state that it had at that step, as a resumed run would
                the_run.note(str(back))
                saved_step = the_run.saved_step
        status = "done"
        if console and group.is_lead:
            console.stop()
            if events:
                events.emit("run_end", status=status)
            _conclude(console, the_run, run_dir, digest)
            flushed.sweep(run_dir.path, None)
        return 0
    except KeyboardInterrupt as interrupt:
        interrupts.ignored = True
        status = "interrupted"
        saved = _save_interrupted(config, group, the_run)
        if group and not saved:
            group.flush_copies()
        raise Interrupted(f"interrupted by {str(interrupt) or 'a signal'}; {f'saved {saved}' if saved else 'the processes were stopped'}" + _how_to_resume(config)) from None
    except BelowMinimum as error:
        saved = the_run.save_now() if the_run else None
        message = f"{error}; saved {saved}" if saved else f"{error}{_how_to_resume(config)}"
        if events:
            events.emit("error", error=type(error).__name__, message=message)
        raise BelowMinimum(message) from None
    except EverstepError as error:
        if own_events:
            own_events.emit("error", error=type(error).__name__, message=str(error))
        if group and not isinstance(error, InvariantViolated):  # a state that is not what it should be is nothing to go on from
            group.flush_copies()
        raise
    except Exception as error:  # a bug of ours: it comes with its traceback, and whoever looks at the run shall see what ended it
        if own_events:
            own_events.emit("error", error=type(error).__name__, message=f"{type(error).__name__}: {error}")
        raise
    finally:
        interrupts.ignored = True
        with contextlib.ExitStack() as last_first:  # all of it happens, whatever fails
            last_first.callback(watching.close)
            if log:
                last_first.callback(log.close)
            if events:
                last_first.callback(events.close)
                if status != "done" and not (attach and group is None):  # a takeover that is refused ends nothing
                    last_first.callback(events.emit, "run_end", status=status)
            if the_run and the_run.metrics:
                last_first.callback(the_run.metrics.close)
            elif metrics:
                last_first.callback(metrics.close)
            if group is None and entry and entry.lighthouse:
                last_first.callback(entry.lighthouse.close, status)
            if group:
                last_first.callback(group.close, status)
                if console and group.unfired_faults:
                    last_first.callback(console.note, f"faults that never fired: {'; '.join(group.unfired_faults)}")
            if console:
                last_first.callback(console.stop)


# -- parts -------------------------------------------------------------------------------------------------------------------


def _enter(
    config: Config, clean: bool, launcher: str, watching: Watching
) -> tuple[RunDir, Chosen, EventLog | None, Entry | None]:
    """The run's folder and the checkpoint to start from; the controller's log, or how this rank of torchrun comes into the run."""
    if launcher == "local":
        from everstep.cluster.local import group as local

        entry = local.enter(config, clean, watching)
        return entry.run_dir, entry.chosen, None, entry
    run_dir, chosen = attempt.prepare(config, clean)
    watching.begin(run_dir, own_log=True)
    events = EventLog(run_dir.events / "lead.jsonl", "lead", watching.alerts.offer)
    events.emit("run_start", step=chosen.step, attempt=run_dir.attempt, recipe=config.recipe, launcher=launcher,
                replicas=config.layout.replicas, spares=config.layout.spares)
    return run_dir, chosen, events, None


def check_attach(config: Config, clean: bool, launcher: str) -> None:
    """What ``--attach`` refuses before it touches anything. Raises BadInput."""
    if launcher != "ray":
        raise BadInput(f"--attach: with launcher={launcher} workers do not outlive a rank's death; start again with resume=auto")
    if clean:
        raise BadInput("--clean deletes the run that --attach would go on with; give one of them")
    if config.recovery.controller_grace_s <= 0:
        raise BadInput("--attach needs recovery.controller_grace_s above 0, in the run that is taken over too; start again with resume=auto")
    run_dir = open_run_dir(config.run_dir)
    if rendezvous.find(run_dir.path) is None:
        raise BadInput(f"--attach: in {run_dir.path} nobody waits for a controller; start again with resume=auto")
    if differing := config_files.differing(config, run_dir.configs / "resolved.yaml"):
        raise BadInput(
            f"--attach: the run in {run_dir.path} was started with another {', '.join(differing)}; give the same configuration"
        )


def _enter_again(config: Config, watching: Watching) -> tuple[RunDir, Chosen, EventLog, CommitLog]:
    """The folder of a run that goes on with its workers: no new attempt. Raises BadInput, before anything of the run is touched, if its controller lives."""
    run_dir = open_run_dir(config.run_dir)
    log = CommitLog(run_dir.path / "commits.log", takeover=True)
    try:
        watching.begin(run_dir, own_log=True)
        return run_dir, Chosen("attach"), EventLog(run_dir.events / "lead.jsonl", "lead", watching.alerts.offer), log
    except BaseException:  # Ctrl-C, too: the log is held by nobody then
        log.close()
        raise


def _start_group(
    config: Config, launcher: str, run_dir: RunDir, events: EventLog | None, on_record: Any, entry: Entry | None,
    host: Callable[[Config], Host] | None = None, log: CommitLog | None = None,
) -> Group:
    """``log``: of the run whose workers are taken over."""
    if launcher == "ray":
        from everstep.cluster.controller.controller import Controller

        assert events is not None
        made = host(config) if host else _ray_host(config, rendezvous.find(run_dir.path) if log else None)
        return Controller(config, run_dir, events, made, on_record, log)
    from everstep.cluster.local.group import LocalGroup

    assert entry is not None
    return LocalGroup(config, entry)


def _ray_host(config: Config, before: rendezvous.Announcement | None) -> Host:
    from everstep.cluster.ray.host import RayHost

    return RayHost(config, derive.layout(config), before.host if before else None)


def _follow(console: Console, run_dir: RunDir, replicas: int, ongoing: Ongoing) -> Any:
    """Print one line per recovery, when the replica is back: worked out from the event log, as the report does."""
    deaths: list[int] = [0]  # views with fewer members that have not been followed by full strength yet
    told: set[float] = set()

    def on_record(record: Record) -> None:
        if record.kind is Kind.VIEW and record.cause != "start":
            console.note(f"view {record.view.epoch}: replicas {list(record.view.replicas)} ({record.cause})")
        if record.cause and record.cause != "start":
            deaths[0] += 1
        full = len(record.view.contributors) == replicas
        if record.kind is Kind.COMMIT and full and deaths[0]:
            deaths[0] = 0
            events = read_events(run_dir.events)
            for recovery in recoveries(events):
                if recovery.full_strength_s is not None and recovery.t_wall not in told:
                    told.add(recovery.t_wall)
                    console.recovery(recovery)
                    ongoing.recovered(recovery, events)

    return on_record


def _tracker_failed(console: Console | None, events: EventLog | None) -> Callable[[str, str], None]:
    def failed(tracker: str, reason: str) -> None:
        if events:
            events.emit("tracker_failed", tracker=tracker, reason=reason)
        if console:
            console.note(f"{tracker} failed, metrics go on without it: {reason}")

    return failed


def _newest_checkpoint(config: Config) -> int:
    """The step of the checkpoint that `latest` names; 0 if there is none."""
    named = pointed_at(checkpoints_of(config))
    return (step_of(named) or 0) if named else 0


def _introduce(
    console: Console, config: Config, data: PreparedData, run_dir: RunDir, chosen: Chosen, launcher: str, entry: Entry | None
) -> None:
    sizes = config.layout
    console.note(
        f"{config.recipe} of {config.model.path}, launcher {launcher}: {sizes.replicas} replicas of "
        f"{derive.layout(config).ranks_per_replica} ranks (tp {sizes.tp}, cp {sizes.cp}, pp {sizes.pp}, dp {sizes.dp}, ep {sizes.ep}), "
        f"{sizes.spares} spares; "
        f"{len(data.train)} training samples; folder {run_dir.path}"
    )
    for dataset in (data.train, data.eval, data.warmup):
        if dataset and dataset.dropped:
            first = dataset.dropped[0]
            console.note(f"{dataset.key}: {len(dataset.dropped)} records left out, the first: record {first.record} ({first.reason})")
    if data.eval and (seen := data.held_out_in_training()):
        console.note(f"{data.eval.key}: {seen} of {len(data.eval)} held-out samples are training samples too")
    if chosen.resume == "attach":
        console.note("taking over from a controller that was killed")
        return
    if config.resume != "never":
        console.note(entry.explained if entry else chosen.explain())
    console.note("starting the processes")


def _conclude(console: Console, the_run: Run, run_dir: RunDir, digest: str) -> None:
    """The closing table, from the event log; and the picture."""
    import rich

    events = read_events(run_dir.events)
    rich.print(summary_table(events))
    for name, value in the_run.summary.items():
        console.note(f"{name.replace('_', ' ')}: {value:.3f}")
    console.note(f"weight hashes of replicas {the_run.group.status()['replicas']} are equal: {digest[:16]}")
    try:
        if the_run.metrics:
            console.note(f"picture: {reward_curve(the_run.metrics.path, run_dir.events, run_dir.report / 'reward_curve.png')}")
    except (BadInput, OSError) as error:  # the run is well without it
        console.note(f"no picture: {error}")
    if not account(events).exact:
        raise InvariantViolated(f"{run_dir.events}: a step or a sample was lost or used twice (see the table)")


def _save_interrupted(config: Config, group: Group | None, the_run: Run | None) -> Path | None:
    """With checkpoint.on_interrupt: a checkpoint of the last committed step, unless there is one; where it is."""
    if not config.checkpoint.on_interrupt or group is None or the_run is None:
        return None
    try:
        return group.save_interrupted(the_run.saved_step)
    except EverstepError as error:  # the run ends all the same, and says from where it goes on
        the_run.note(f"no checkpoint was saved: {error}")
        return None


def _how_to_resume(config: Config) -> str:
    try:
        newest = attempt.chosen(config.model_copy(update={"resume": "auto"}))
    except EverstepError as error:  # storage that does not answer now: the run's own end is what matters
        return f"; whether there is a checkpoint to continue from could not be seen ({error})"
    return f"; continue after step {newest.step} with resume=auto" if newest.path else "; no checkpoint was complete"


def _quiet_libraries() -> None:
    """Advice to the developers of torch, Megatron and transformers is not for who trains with them."""
    warnings.filterwarnings("ignore", module=r"torch|megatron|transformers")
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")  # Megatron reads it


class _Interrupts:
    """SIGINT and SIGTERM interrupt the main thread, so that everything is shut down in order; during that they are ignored.

    ``defer(name)``: whether the interrupt comes later by itself, at a better moment.
    """

    ignored = False
    defer: Callable[[str], bool] = staticmethod(lambda name: False)

    def __enter__(self) -> _Interrupts:
        self._old = {n: signal.signal(n, self._raise) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        # No Exception: code between here and the driver that handles its own errors must not swallow it.
        name = signal.Signals(number).name
        if not self.ignored and not self.defer(name):
            raise KeyboardInterrupt(name)
