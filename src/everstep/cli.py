"""The command line. Each command is a few lines around something importable; heavy imports happen inside them.

An :class:`EverstepError` becomes one sentence on stderr and its exit code (docs/cli.md); ``--debug`` shows the traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
import typer.core

from everstep.errors import BadInput, EverstepError, Interrupted

# click's class, under the one name that is public in every typer: newer ones carry a click of their own.
_UsageError: type[Any] = typer.BadParameter.__mro__[1]


class _Commands(typer.core.TyperGroup):
    def get_help_option(self, ctx: Any) -> Any:
        """Who reads the list of commands has found --help: without it the list fits one screen of 24 lines."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.hidden = True
        return option

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # typer would end without a word
            raise Interrupted("interrupted") from None


app = typer.Typer(
    name="everstep",
    cls=_Commands,
    help="Post-training of language models that survives the death of any process.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)

# Overrides look like options that nobody declared; click hands them on untouched.
_OVERRIDES = {"ignore_unknown_options": True}

Config_ = Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file; docs/config.md lists its keys.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE | --KEY VALUE]...", help="Replace values of the file.", show_default=False),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]  # looked for in main()


@app.command(context_settings=_OVERRIDES)
def train(
    config: Config_,
    overrides: Overrides = None,
    clean: Annotated[bool, typer.Option("--clean", help="Delete what an earlier run left in run_dir.")] = False,
    attach: Annotated[
        bool, typer.Option("--attach", help="Take over the workers of a run whose controller was killed.")
    ] = False,
    debug: Debug = False,
) -> int:
    """Train as CONFIG says.

    Exit: 0 done, 2 bad input, 3 resumable, 4 invariant violated, 130 interrupted.
    """
    from everstep.config.load import load_config

    loaded = load_config(config, overrides or [])
    same = ["train", config, *(overrides or []), *(["--clean"] * clean), *(["--debug"] * debug)]
    from everstep import supervisor

    if supervisor.wanted(loaded):
        return supervisor.supervise(loaded, [*same, *(["--attach"] * attach)])
    from everstep.driver import run as run_recipe

    again = ["-m", "everstep", *same]
    return run_recipe(loaded, program=again, clean=clean, attach=attach)


@app.command(context_settings=_OVERRIDES)
def up(
    config: Config_,
    overrides: Overrides = None,
    clean: Annotated[bool, typer.Option("--clean", help="Delete what an earlier run left in run_dir.")] = False,
    debug: Debug = False,
) -> int:
    """Train without Ray: all replicas on this machine, each a torchrun.

    Starts a lighthouse and one process for each replica, with devices of its own,
    and starts anew what dies. What they print is shown here; RUN/logs/latest has their logs.
    """
    from everstep.config.load import load_config

    given = overrides or []
    loaded = load_config(config, given)
    from everstep.driver import run_replicas

    again = ["-m", "everstep", "train", config, *given, *(["--clean"] * clean), *(["--debug"] * debug)]
    return run_replicas(loaded, again, clean)


@app.command()
def lighthouse(
    bind: Annotated[str, typer.Option(help="Address to listen on; torchft's ADDRESS:PORT also.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Of torchft's server; the two after it are ours.")] = 29510,
    min_replicas: Annotated[int, typer.Option("--min-replicas", "--min_replicas", help="That a run waits for to begin.")] = 1,
    quorum_tick_ms: Annotated[int, typer.Option("--quorum-tick-ms", "--quorum_tick_ms", min=1, max=86_400_000, help="Between looks at the quorum, ms.")] = 100,
    join_timeout_ms: Annotated[
        int, typer.Option("--join-timeout-ms", "--join_timeout_ms", min=1, max=86_400_000, help="For stragglers at the start of a run, ms.")
    ] = 60_000,
    heartbeat_timeout_ms: Annotated[
        int, typer.Option("--heartbeat-timeout-ms", "--heartbeat_timeout_ms", min=1, max=86_400_000, help="Until torchft counts one out, ms.")
    ] = 5000,
    debug: Debug = False,
) -> int:
    """Where replicas started one by one find each other.

    Torchft's lighthouse and, one port up, the coordinator of one run after the
    other. Replicas find it by TORCHFT_LIGHTHOUSE. Runs until it gets SIGTERM; that
    ends no run. Started again on the same port, also after it was killed, it goes
    on: training waits for it.
    """
    import signal
    import threading

    from everstep.cluster.local.lighthouse import serve

    host, _, digits = bind.rpartition(":")
    if host and digits.isdecimal():
        bind, port = host, int(digits)
    until = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: until.set())
    serve(bind, port, min_replicas, quorum_tick_ms, join_timeout_ms, heartbeat_timeout_ms, lambda text: print(text, flush=True), until)
    return 0


@app.command(context_settings=_OVERRIDES)
def chaos(
    config: Config_,
    overrides: Overrides = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same schedule.")] = 0,
    rate: Annotated[float, typer.Option(help="Expected faults per step.")] = 0.1,
    faults: Annotated[
        str, typer.Option(help="Kinds: kill stop exit segv gil oom nan hang partition error.")
    ] = "kill,stop,exit,segv",
    reckless: Annotated[bool, typer.Option("--reckless", help="Even what the run cannot survive.")] = False,
    clean: Annotated[bool, typer.Option("--clean", help="Delete what an earlier run left in run_dir.")] = False,
    debug: Debug = False,
) -> int:
    """Train under random faults; then prove that nothing was lost.

    Prints the schedule, which replaces the file's faults. Without --reckless one
    replica is never struck, and no more processes die than there are spares, and
    replicas above recovery.min_replicas. Exit code 4: an invariant was violated.
    """
    from everstep.config.load import load_config

    loaded = load_config(config, overrides or [])
    from everstep.chaos import run as run_under_faults

    return run_under_faults(loaded, seed, rate, faults, reckless, clean, sys.stdout)


@app.command(context_settings=_OVERRIDES)
def plan(config: Config_, overrides: Overrides = None, debug: Debug = False) -> None:
    """Check CONFIG; show sizes, ranks, memory. Starts nothing."""
    from everstep.config.load import load
    from everstep.plan import make_plan
    from everstep.plan.terminal import print_plan

    loaded = load(config, overrides or [])
    print_plan(make_plan(loaded.config), loaded, _console())


@app.command(context_settings=_OVERRIDES)
def explain(
    key: Annotated[str, typer.Argument(metavar="KEY", help="A key (optimizer.lr) or a section (optimizer).")],
    config: Annotated[
        str | None, typer.Argument(metavar="[CONFIG]", help="Show the value there, and its origin.")
    ] = None,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Say what KEY means, its unit, default, value and origin."""
    from everstep.config.explain import explain as look_up
    from everstep.config.load import load

    for index, found in enumerate(look_up(key, load(config, overrides or []) if config else None)):
        rows = [("type", found.kind), ("unit", found.unit), ("default", found.default)]
        if found.origin is not None:
            rows.append(("value", f"{found.value}  ({found.origin})"))
        print(("\n" if index else "") + found.key + "\n  " + found.meaning)
        for name, text in rows:
            if text is not None:
                print(f"  {name:<8} {text}")


config_app = typer.Typer(help="Translate another system's configuration.", rich_markup_mode=None)
app.add_typer(config_app, name="config")


@config_app.command("import", context_settings=_OVERRIDES)
def config_import(
    given: Annotated[
        list[str], typer.Argument(metavar="FILE_OR_OVERRIDES...", help="A script or file; after it, or alone, its options as KEY=VALUE.")
    ],
    system: Annotated[str, typer.Option("--from", help="siirl torchtitan ray-example twinkle.")],
    records: Annotated[int | None, typer.Option(min=1, help="Training records, where passes are counted.", show_default=False)] = None,
    debug: Debug = False,
) -> None:
    """Print the configuration of another system as one of ours.

    Each key says what it was; what has no counterpart is named, with the reason.
    Nothing of what is read is run. docs/migrating.md has every option.
    """
    from everstep.config.importing import as_yaml, translate

    result = translate(system, given, records)
    print(as_yaml(result, " ".join(["--from", system, *given])), end="")
    left = len(result.unsupported) + len(result.unknown)
    print(f"everstep: {len(result.keys)} keys, {len(result.implied)} options need none, {left} have no counterpart (see the head of the file)"
          + (f"; to be given: {', '.join(result.missing)}" if result.missing else ""), file=sys.stderr)


@app.command()
def generate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A checkpoint, a run folder, or a model as in model.path.")
    ],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT")],
    max_tokens: Annotated[int, typer.Option(help="Most tokens to make.")] = 256,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token each time.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    debug: Debug = False,
) -> None:
    """Complete PROMPT with a checkpoint or any model."""
    from everstep.generate import generate as complete

    complete(model, prompt, max_tokens, temperature, seed, sys.stdout)


@app.command()
def data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="gsm8k or deepscaler.")],
    places: Annotated[
        list[str],
        typer.Argument(metavar="[INPUT] OUT", help="INPUT: folder (or http address of one) with the original files; default: download."),
    ],
    debug: Debug = False,
) -> None:
    """Make OUT/train.parquet and test.parquet of a release."""
    from everstep.data.releases import convert

    if len(places) > 2:
        raise BadInput(f"everstep data takes NAME, perhaps INPUT, and OUT; not {' '.join(places)}")
    for split, count in convert(name, places[0] if len(places) == 2 else None, places[-1]).items():
        print(f"{places[-1]}/{split}.parquet: {count} records")


@app.command()
def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.")],
    debug: Debug = False,
) -> None:
    """Table of a run's recoveries; page and pictures of it."""
    from everstep.telemetry.dashboard.report import write
    from everstep.telemetry.dashboard.story import tell
    from everstep.telemetry.report import summary_table
    from everstep.telemetry.status import headline

    story = tell(run)
    _console().print(headline(story.status), *([story.status.cause] if story.status.cause else []), sep="\n", markup=False, highlight=False)
    _console().print(summary_table(story.events))
    for path in write(story):
        print(path)


@app.command()
def status(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run, or where one listens: [TOKEN@]HOST:PORT.")],
    as_json: Annotated[bool, typer.Option("--json", help="Everything, for programs.")] = False,
    debug: Debug = False,
) -> None:
    """State of every rank, link and spare; what is out, why."""
    from everstep.telemetry.status import describe, status

    state = status(run)
    if as_json:
        from everstep.telemetry.events import to_json

        print(to_json(state.as_json()))
    else:
        _console().print(describe(state))


@app.command()
def doctor(
    folders: Annotated[list[str] | None, typer.Argument(metavar="[FOLDER]...", help="Where a run would write.", show_default=False)] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    processes: Annotated[int, typer.Option(min=1, max=256, help="Of the all-reduce on the CPU; on GPUs one each.")] = 2,
    seconds: Annotated[float, typer.Option(min=0.0, max=3600.0, help="For each measurement.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    debug: Debug = False,
) -> None:
    """Is this machine fit? Exit code 3: a check failed."""
    import torch

    from everstep.doctor import Unfit, examine, table, worst
    from everstep.doctor import as_json as to_json

    if device not in ("auto", "cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise BadInput(f"--device {device}: " + ("no CUDA device is visible" if device == "cuda" else "use auto, cpu or cuda"))
    chosen = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    found = examine(chosen, folders or ["."], processes, seconds)
    if as_json:
        print(to_json(found))
    else:
        _console().print(table(found))
    if worst(found) == "bad":
        raise Unfit("; ".join(f"{f.name} of {f.device}: {f.told}" for f in found if f.state == "bad"))


@app.command()
def logs(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.")],
    rank: Annotated[str | None, typer.Option(help="REPLICA/RANK, a number through all replicas, or a process: w3, lead.")] = None,
    around: Annotated[int | None, typer.Option(metavar="STEP", help="Only from its begin to the next.")] = None,
    level: Annotated[str, typer.Option(help="The least: debug info warning error.")] = "info",
    as_json: Annotated[bool, typer.Option("--json", help="One object a line, for programs.")] = False,
    debug: Debug = False,
) -> None:
    """Logs and events of all processes, merged by time."""
    from dataclasses import asdict

    from everstep.telemetry.events import to_json
    from everstep.telemetry.logs import lines, render

    for line in lines(run, rank, around, level):
        print(to_json(asdict(line)) if as_json else render(line))


@app.command()
def dashboard(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run, or where one listens: [TOKEN@]HOST:PORT.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: a free one.")] = 0,
    with_parent: Annotated[bool, typer.Option("--with-parent", hidden=True)] = False,
    debug: Debug = False,
) -> None:
    """A page of a run, live or past; /metrics for Prometheus.

    From elsewhere: a run prints its address, with a token, when it starts. The
    token may be in EVERSTEP_WATCH_TOKEN, and RUN the http address of a dashboard.
    """
    if with_parent:  # of a run, which it must not outlive
        import signal

        from everstep.cluster.processes import die_with_parent

        die_with_parent(signal.SIGTERM)
    from everstep.telemetry.dashboard.server import serve

    serve(run, host, port)


@app.command()
def checkpoints(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run, or one with checkpoints (s3://... too).")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte and compare its checksum.")] = False,
    prune: Annotated[bool, typer.Option("--prune", help="Delete those that are kept no longer.")] = False,
    keep_last: Annotated[
        int | None, typer.Option(help="With --prune: keep so many.  [default: as configured]", show_default=False)
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option(help="With --prune: and one every so many steps.  [default: as configured]", show_default=False)
    ] = None,
    debug: Debug = False,
) -> int:
    """List, verify, prune the checkpoints of a run.

    Exit code 3: one of them cannot be used.
    """
    from everstep.checkpoint import listing

    at = listing.find(run)
    if (keep_last is not None or keep_every is not None) and not prune:
        raise BadInput("--keep-last and --keep-every say what --prune deletes; add it")
    for deleted in listing.prune(run, at, keep_last, keep_every) if prune else []:
        print(f"deleted {deleted}")
    found = listing.rows(at, verify)
    _console().print(listing.table(found, verify))
    for wrong in (pointers := listing.pointers(at)):
        _say(wrong, 3)
    return 3 if pointers or any(row.trouble for row in found) else 0


@app.command()
def export(
    checkpoint: Annotated[str, typer.Argument(metavar="CKPT", help="A checkpoint: RUN/checkpoints/step-N, s3://... too.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="A new or empty folder.")],
    adapter: Annotated[bool, typer.Option("--adapter", help="Only the LoRA adapters, as peft loads them.")] = False,
    critic: Annotated[bool, typer.Option("--critic", help="The critic instead of the model (recipe=ppo).")] = False,
    debug: Debug = False,
) -> None:
    """Make a Hugging Face directory of a checkpoint.

    Without a GPU, and whatever layout it was saved with. LoRA adapters are merged
    into the weights, unless --adapter asks for them alone.
    """
    from everstep.checkpoint.export import export as make

    files = make(checkpoint, out, adapter, critic)
    print(f"{out}: {', '.join(files)}")


@app.command()
def verify(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.")],
    debug: Debug = False,
) -> int:
    """Prove from a run's logs that nothing was lost."""
    from everstep.errors import InvariantViolated
    from everstep.run_dir import open_run_dir
    from everstep.telemetry.history import check, print_findings, worst

    findings = check(open_run_dir(run).path)
    print_findings(findings, sys.stdout)
    return InvariantViolated.exit_code if worst(findings) else 0


@app.command()
def drain(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run that is under way.")],
    target: Annotated[str, typer.Argument(metavar="NODE|RANK", help="A node (host name or Ray id), or a rank (1/0), or a worker (w3).")],
    wait_s: Annotated[float, typer.Option(help="Wait so many seconds until they have left; 0: do not wait.")] = 600.0,
    debug: Debug = False,
) -> int:
    """Replace ranks between two steps; nothing is redone.

    Spares take their places. No process is started any more on a drained node.
    Exit code 3: some have not left in time (they cannot be spared yet).
    """
    from everstep.cluster.controller.drain import drain as drain_ranks

    return drain_ranks(run, target, wait_s, sys.stdout)


@app.command()
def engines(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run that is under way, with rollout.engines.")],
    count: Annotated[int, typer.Argument(metavar="N", min=1, help="Rollout engines from now on.")],
    debug: Debug = False,
) -> int:
    """Add rollout engines to a run, or take some away.

    What an engine that leaves was at goes on elsewhere from what it has.
    """
    from everstep.cluster.endpoint import ask
    from everstep.run_dir import open_run_dir

    told = ask(open_run_dir(run).path, "engines", engines=count)
    print(f"staying: {', '.join(told['engines']) or 'none'}; leaving: {', '.join(told['leaving']) or 'none'}; {count} from now on")
    return 0


def _console() -> Any:
    from rich.console import Console

    # A pipe or a log has no width of its own; tables must not be folded to 80 columns there.
    return Console(width=None if sys.stdout.isatty() else 120)


# ---------------------------------------- errors and exit codes


def run(arguments: Sequence[str]) -> int:
    """The exit code of one command line. Errors are printed, none are raised (but for ``--debug``, and bugs)."""
    debug = "--debug" in arguments
    try:
        return int(app(args=list(arguments) or ["--help"], standalone_mode=False, prog_name="everstep") or 0)
    except EverstepError as error:
        told = _told_launcher(error)
        if debug:
            raise
        return error.exit_code if told else _say(error, error.exit_code)
    except _UsageError as error:
        command = error.ctx.command_path if error.ctx else "everstep"
        return _say(f"{error.format_message().rstrip('.')} (see {command} --help)", BadInput.exit_code)
    except typer.Exit as stop:
        return stop.exit_code


def _told_launcher(error: EverstepError) -> bool:
    """Whether this process is a rank whose launcher was told the error, and says it once for all ranks."""
    if "RANK" not in os.environ:
        return False
    from everstep.cluster.local.torchrun import report_exit

    return report_exit(error)


def _say(what: object, code: int) -> int:
    print(f"everstep: {what}", file=sys.stderr)
    return code


def main() -> NoReturn:
    """Entry point of ``everstep`` and ``python -m everstep``."""
    # Functions named in the configuration are found in the folder where everstep is started, as with `python -m`.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except EverstepError as error:  # --debug
        import traceback

        traceback.print_exc()
        code = error.exit_code
    except BrokenPipeError:  # `everstep plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
