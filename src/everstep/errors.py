"""The typed family of errors: each says what happened, where, and what to do.

Exit codes (documented in docs/cli.md, relied upon by schedulers):

    0    done
    2    bad input; nothing was started
    3    cannot continue now, but the run can be resumed
    4    an invariant was violated; do not resume without looking
    130  interrupted
"""

from __future__ import annotations


class EverstepError(Exception):
    """Base of all errors a user can meet. ``exit_code`` is the process's exit status."""

    exit_code = 3


class BadInput(EverstepError):
    """The configuration, data or environment cannot work. Raised before any process is started."""

    exit_code = 2


class ConfigError(BadInput):
    """An unknown key, a value of the wrong type, or a combination that cannot work; names the keys."""


class ReplicaBroken(EverstepError):
    """A collective inside this rank's replica failed or was aborted because another rank of it is gone.

    The rank that raises it is alive and keeps its memory; its replica must be re-formed before it computes again.
    """


class LinkBroken(EverstepError):
    """A collective over the link failed or was overtaken by a newer view. Never leaves the step transaction."""


class LedgersDiffer(LinkBroken):
    """The members' ledgers contradict each other (a slot counts twice, ranks of a replica hold different ones): all are void."""


class Fenced(EverstepError):
    """This process holds an older epoch than the coordinator; it must stop contributing at once."""


class CoordinatorLost(Fenced):
    """This rank's connection to the coordinator ended, or nothing came over it for ``recovery.fence_s``: it may have been expelled
    without knowing, so it stops contributing. The coordinator, if it lives, expels it and goes on with the others."""


class Superseded(Fenced):
    """A call of a controller that is gone: the one that took over makes it anew. The rank lives and keeps its state."""


class NotEnoughReplicas(EverstepError):
    """Fewer living replicas than ``recovery.min_replicas``; the run stops and can be resumed."""


class RolledBack(EverstepError):
    """No living replica held the last committed step; all went back to the last copy of an older one (``step``). Never leaves the
    driver: it enters the recipe again, with the state that the recipe had then."""

    def __init__(self, step: int, message: str):
        super().__init__(message)
        self.step = step


class BelowMinimum(NotEnoughReplicas):
    """Living replicas hold the committed state, but fewer than ``recovery.min_replicas``, and nobody will join them (in time): the step
    in progress was given up, and what they hold can be saved."""


class Halted(EverstepError):
    """The coordinator gave the step up for good. Nobody has applied it; this rank holds the step before it."""


class DeadlineExceeded(EverstepError):
    """A wait passed its deadline. Names what was awaited, for how long, and the key that sets the deadline."""


class WorkerFailed(EverstepError):
    """User code or the engine raised inside a worker while every process was alive (not a fault to recover from)."""


class NonFinite(EverstepError):
    """A loss or gradient that is not finite, twice, and recovery.non_finite=stop."""


class InvariantViolated(EverstepError):
    """Something that must always hold did not (for example replicas with unequal weights)."""

    exit_code = 4


class RunEnded(EverstepError):
    """The run came to its end without this replica (launcher local: it died shortly before, or came too late). Nothing is wrong."""

    exit_code = 0


class Interrupted(EverstepError):
    """Ctrl-C or SIGTERM; everything was shut down in order."""

    exit_code = 130


def typed(name: str, message: str) -> EverstepError:
    """The error of the family that is called ``name``, as another process told it; WorkerFailed if none is."""
    found = globals().get(name)
    if isinstance(found, type) and issubclass(found, EverstepError):
        return found(message)
    return WorkerFailed(f"{name}: {message}")


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without a trailing full stop; of one without text its kind. For the sentence of another error."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
