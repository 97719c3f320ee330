"""The numbers of a run for Prometheus (``/metrics`` of the dashboard). ``deploy/grafana/everstep.json`` draws them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from everstep.telemetry.dashboard.story import Story
from everstep.telemetry.status import ENDED

__all__ = ["CONTENT_TYPE", "exposition", "families"]

_STATES = ("starting", "running", *ENDED)
_RANK_STATES = ("in", "heals", "forms", "out")


def exposition(story: Story) -> str:
    """The text format of Prometheus."""
    return generate_latest(_Once(story)).decode()  # type: ignore[arg-type]


def families(story: Story) -> Iterator[Metric]:
    """All metrics with their values. Totals are of the whole run, over all its attempts."""
    state, good, books = story.status, story.goodput, story.account
    yield _gauge("everstep_run_state", "1 for the state the run is in.", ["state"], [([s], float(s == state.state)) for s in _STATES])
    yield _one("everstep_step", "Last committed step.", float(state.committed_step))
    yield _one("everstep_replicas", "Replicas the run has.", float(state.replicas))
    yield _one("everstep_live_replicas", "Replicas that take part.", float(len(set(state.members) - set(state.healing))))
    yield _one("everstep_spares", "Warm spares.", float(len(state.spares)))
    yield _one("everstep_goodput_ratio", "Productive share of the time of all ranks.", good.goodput)
    yield _one("everstep_ettr_ratio", "Share of wall time in which at least one rank was productive.", good.ettr)
    yield _one("everstep_samples_per_second", "Committed samples per second of wall time.", good.samples_per_second)
    yield _count("everstep_samples_committed", "Samples committed.", float(books.samples_committed))
    yield _count("everstep_samples_dropped", "Samples dropped with a reason.", float(books.samples_dropped))
    yield _count("everstep_deaths", "Deaths of ranks and spares.", float(len(story.recoveries)))
    yield _count("everstep_slots_redone", "Slots computed again after deaths.", float(sum(r.slots_redone for r in story.recoveries)))
    yield _one("everstep_violations", "Steps or samples lost or used twice: 0 unless an invariant is broken.", float(
        len(books.steps_missing) + len(books.steps_doubled) + len(books.samples_lost) + len(books.samples_doubled)))
    parts = CounterMetricFamily("everstep_time_seconds", "Time of all ranks together, by what it went into.", labels=["part"])
    for part, seconds in good.total.items():
        parts.add_metric([part], seconds)
    yield parts
    last = {name: next((getattr(r, name) for r in reversed(story.recoveries) if getattr(r, name) is not None), None)
            for name in ("detect_s", "stall_s", "full_strength_s")}
    spans = [([name.removesuffix("_s")], value) for name, value in last.items() if value is not None]
    yield _gauge("everstep_last_recovery_seconds", "Of the last death: detected after, survivors stalled for, full strength after.", ["span"], spans)
    yield _gauge("everstep_rank_state", "1 for the state of each rank.", ["replica", "rank", "state"], [
        ([str(r.replica), str(r.rank), s], float(s == r.state)) for r in state.ranks for s in _RANK_STATES])
    yield _gauge("everstep_rank_phase_since_seconds", "When each rank entered its phase, seconds since 1970.", ["replica", "rank", "phase"], [
        ([str(r.replica), str(r.rank), r.phase], r.since) for r in state.ranks])
    row = story.rows[-1] if story.rows else {}
    yield _gauge("everstep_metric", "Metrics of the last logged step, by their names in docs/metrics.md.", ["name"], [
        ([name], value) for name, value in row.items() if name not in ("step", "t_wall")])


class _Once(Collector):
    def __init__(self, story: Story):
        self._story = story

    def collect(self) -> Iterator[Metric]:
        return families(self._story)


def _gauge(name: str, meaning: str, labels: list[str], values: list[tuple[list[str], float]]) -> Metric:
    family = GaugeMetricFamily(name, meaning, labels=labels)
    for at, value in values:
        family.add_metric(at, value)
    return family


def _one(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(name, meaning, value=value)


def _count(name: str, meaning: str, value: float) -> Metric:
    return CounterMetricFamily(name, meaning, value=value)
