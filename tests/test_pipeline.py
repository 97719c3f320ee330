"""The graph of stages: what is refused before a run, in which order stages run, and what lies on disk before the first update."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.runs import DEMO, ROOT, config

from everstep.cluster.batch import TrainingBatch
from everstep.config.check import check_plan
from everstep.engine.loss import LossSpec
from everstep.errors import BadInput, DeadlineExceeded, EverstepError, WorkerFailed
from everstep.recipes.updates import transactions
from everstep.rl import pipeline
from everstep.rl.execute import Context, execute, loss_of
from everstep.rl.pipeline import PROMPTS, Pipeline, PipelineError, Stage, Update, standard
from everstep.rl.record import IterationRecord, IterationRecords, settings_digest
from everstep.rl.rewards import Scorer

PPO = str(ROOT / "examples" / "ppo_kill.yaml")
QUIET = ["faults=[]"]

source = Stage("source", lambda context, prompts: prompts, (PROMPTS,), ("x",))
train = Update("train", "actor", ("x",), "m:loss")


def stage(name: str, reads: str, writes: str, function: Any = None, on: Any = "lead") -> Stage:
    return Stage(name, function or (lambda context, samples: {}), tuple(reads.split()), tuple(writes.split()), on)


# -- what is refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "updates", "says"),
    [
        ([source, stage("a", "y", "z")], [train], "stage a reads y, which no stage writes; there are x, z"),
        ([source, stage("a", "scor", "z"), stage("b", "x", "score")], [train], "reads scor, .*did you mean score"),
        ([source, stage("a", "x c", "b"), stage("d", "b", "c")], [train], "wait for each other: a -> d -> a"),
        ([source, stage("a", "x", "z"), stage("b", "x", "z")], [train], "column z is written by stage a and by stage b"),
        ([source, stage("a", "x", "x")], [train], "column x is written by stage source and by stage a"),
        ([source, stage("a", "x", "prompts")], [train], "column prompts is written by the data and by stage a"),
        ([source, stage("a", "x", "z"), stage("a", "x", "y")], [train], "two stages are called a"),
        ([source, stage("a b", "x", "z")], [train], "'a b' cannot be the name"),
        ([source, Stage("a", "m:f", ("x",), "score")], [train], r"writes of stage a is 'score'; it must be a tuple of names"),
        ([stage("a", "", "x")], [train], "one stage must read prompts .*none does"),
        ([source, stage("a", "prompts", "z")], [train], "one stage must read prompts .*source, a do"),
        ([source, stage("a", "x", "z")], [], "nothing is trained"),
        ([source], [dataclasses.replace(train, reads=("y",))], "stage train reads y, which no stage writes"),
        ([source], [dataclasses.replace(train, reads="x")], "reads of stage train is 'x'; it must be a tuple of names"),
        ([source, dataclasses.replace(stage("a", "x", "z"), writes="z")], [train], "writes of stage a is 'z'; it must be a tuple of names"),
        ([source, stage("a", "x", "z", on="rank")], [train], "stage a is on 'rank'; it can be on 'ranks' or 'lead'"),
    ],
)
def test_what_cannot_run_is_refused_with_the_stage_and_the_column(stages, updates, says):
    with pytest.raises(PipelineError, match=says) as caught:
        Pipeline(tuple(stages), tuple(updates)).ordered()
    assert caught.value.exit_code == 2


def broken(config):
    return standard(config).replace("advantages", "everstep.rl.stages:advantages", reads=("no_such_column",))


def misnamed(config):
    return standard(config).replace("reward", "everstep.rl.stages:rewards")


def raises(config):
    raise KeyError("no such stage")


def of_two(config, more):
    return standard(config)


def no_pipeline(config):
    return [1]


def failing(config):
    return standard(config).replace("advantages", "everstep.rl.stages:advantages", read=("scores",))


def without_scores(config):
    ours = standard(config).replace("advantages", "everstep.rl.stages:advantages", reads=("group", "loss_mask"))
    return ours.without("reward")


def of_nothing():
    return None


def of_one_argument(config):
    return standard(config).replace("advantages", lambda samples: {}, reads=("scores",))


def of_text(config):
    return standard(config).replace("advantages", 3, reads=("scores",))


def with_critic(config):
    return Pipeline(standard(config).stages, (*standard(config).updates, Update("more", "critic", ("loss_mask",), "everstep.rl.stages:critic_loss")))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("pipeline=tests.test_pipeline:broken", "stage advantages reads no_such_column"),
        ("pipeline=tests.test_pipeline:misnamed", "has no.*rewards|nothing called 'rewards'"),
        ("pipeline=tests.test_pipeline:no_pipeline", "returned a list"),
        ("pipeline=tests.test_pipeline:nothing", "nothing called 'nothing'"),
        ("pipeline=tests.test_pipeline:raises", "pipeline=tests.test_pipeline:raises raised KeyError: 'no such stage'"),
        ("pipeline=tests.test_pipeline:failing", "raised TypeError: .*unexpected keyword argument 'read'"),
        ("pipeline=tests.test_pipeline:without_scores", "no stage writes scores, which is what is logged"),
        ("pipeline=tests.test_pipeline:of_nothing", "cannot be called with 1 positional argument"),
        ("pipeline=tests.test_pipeline:of_two", "cannot be called with 1 positional argument"),
        ("pipeline=tests.test_pipeline:of_one_argument", "stage advantages=<lambda> cannot be called with 2 positional arguments: too many"),
        ("reward.function=exact_mtch", "is not a built-in reward; did you mean exact_match"),
        ("reward.args={weigth: 1}", "unexpected keyword argument 'weigth'"),
        ("pipeline=tests.test_pipeline:of_text", "advantages has a int for a function"),
        ("pipeline=tests.test_pipeline:with_critic", "more .critic.; recipe=grpo trains actor, in one update each"),
    ],
)
def test_a_users_functions_are_checked_before_anything_starts(override, says, tmp_path):
    with pytest.raises(BadInput, match=says):
        check_plan(config(DEMO, tmp_path, *QUIET, override))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rl.advantage=grpo"], "recipe=ppo with rl.advantage=grpo: gae"),
        (["critic.warmup=40"], "critic.warmup=40 leaves none of rl.iterations=40"),
        (["critic.path=/nowhere"], "critic.path=/nowhere is not a directory"),
        (["critic.optimizer.min_lr=1"], "critic.optimizer.min_lr=1.0 is greater than critic.optimizer.lr"),
        (["recipe=grpo", "rl.advantage=grpo", "engine.offload.idle_model=true"], "recipe=grpo has no critic"),
        (["faults=[{step: 46, phase: values}]"], "phase=values: no rollout precedes step 46; those of 41, 43, 45"),
    ],
)
def test_a_critic_that_cannot_work_is_refused(overrides, says, tmp_path):
    with pytest.raises(BadInput, match=says):
        check_plan(config(PPO, tmp_path, *QUIET, *overrides))


# -- order --------------------------------------------------------------------------------------------------------------------


def test_rewards_are_computed_beside_the_ranks(tmp_path):
    """Started before the log-probabilities, and waited for after them: by the advantages, which come last."""
    names = [s.name for s in standard(config(PPO, tmp_path, *QUIET, "rl.kl_coef=0.1")).ordered().stages]
    assert names == ["rollout", "reward", "old_logprob", "ref_logprob", "values", "advantages"]


def test_only_what_something_needs_is_computed(tmp_path):
    names = lambda *overrides: {s.name for s in standard(config(DEMO, tmp_path, *QUIET, *overrides)).stages}
    assert names() == {"rollout", "reward", "advantages"}
    assert names("rl.passes=2") == {"rollout", "reward", "advantages", "old_logprob"}
    assert names("rl.kl_coef=0.1") == {"rollout", "reward", "advantages", "ref_logprob"}
    assert names("rl.importance.level=token") == {"rollout", "reward", "advantages", "old_logprob"}


class Here:
    """The two verbs of a group that the execution itself uses, in one process that is the lead (everstep.cluster.group)."""

    committed_step, is_lead = 0, True

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.thread = threading.get_ident()

    def enter_stage(self, name: str) -> None:
        self.calls.append(name)

    def once(self, function, *args):
        assert threading.get_ident() == self.thread, "with launcher=local this is a collective: never on a stage's thread"
        return function(*args)


def samples_of(count: int) -> TrainingBatch:
    return TrainingBatch({"x": torch.arange(count, dtype=torch.float32)}, {}, [f"s{i}" for i in range(count)])


def context(conf, group=None) -> Context:
    return Context(conf, 3, Scorer(conf), 0.0, samples_of, lambda groups: None, group)


@st.composite
def graphs(draw):
    """Any graph of up to six stages, each reading some of those before it, on ranks or lead, that takes its time."""
    stages, columns = [source], ["x"]
    for i in range(draw(st.integers(1, 6))):
        reads = draw(st.lists(st.sampled_from(columns), min_size=1, unique=True))
        delay = draw(st.sampled_from([0.0, 0.001, 0.004]))

        def function(context, samples, reads=tuple(reads), delay=delay, i=i):
            time.sleep(delay)
            assert set(samples.tensors) == set(reads)
            return {f"c{i}": sum(samples[name] for name in reads) * (i + 2)}, {f"stage_s/m{i}": float(i)}

        stages.append(stage(f"s{i}", " ".join(reads), f"c{i}", function, draw(st.sampled_from(["ranks", "lead"]))))
        columns.append(f"c{i}")
    order = draw(st.permutations(stages))
    return stages, Pipeline(tuple(order), (train,))


@given(graphs())
@settings(max_examples=60, deadline=None)
def test_whatever_overlaps_the_result_is_that_of_one_stage_after_the_other(tmp_path_factory, graph):
    stages, shuffled = graph
    conf = config(DEMO, tmp_path_factory.getbasetemp(), *QUIET)
    expected = samples_of(4)
    for one in stages[1:]:
        made, _ = one.function(None, expected.only(*one.reads))
        expected = expected.with_tensors(**made)
    group = Here()
    done = execute(shuffled.ordered(), context(conf), group, samples_of(4), None)  # type: ignore[arg-type]
    assert done.samples.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in done.samples.tensors.items())
    assert group.calls == [*(s.name for s in shuffled.ordered().stages), ""]
    assert set(done.metrics) == {f"stage_s/m{s.name[1:]}" for s in stages[1:]}


def test_stages_of_both_kinds_really_overlap(tmp_path):
    """Each waits for the other to have begun: neither could end alone."""
    lead, ranks = threading.Event(), threading.Event()

    def meet(mine, other, name):
        def run(context, samples):
            mine.set()
            assert other.wait(10.0), "the other stage did not begin"
            return {name: samples["x"]}
        return run

    graph = Pipeline((source, stage("a", "x", "a", meet(lead, ranks, "a"), "lead"), stage("b", "x", "b", meet(ranks, lead, "b"), "ranks")), (train,))
    done = execute(graph.ordered(), context(config(DEMO, tmp_path, *QUIET)), Here(), samples_of(2), None)  # type: ignore[arg-type]
    assert {"a", "b"} <= done.samples.tensors.keys()


@pytest.mark.parametrize(
    ("function", "error", "says"),
    [
        (lambda c, s: {}, WorkerFailed, "stage a declares that it writes a; it returned $"),
        (lambda c, s: {"a": s["x"], "b": s["x"]}, WorkerFailed, "it returned a, b"),
        (lambda c, s: 3, WorkerFailed, "it returned a int"),
        (lambda c, s: ({"a": s["x"]}, {"mine/x": "wide"}), WorkerFailed, "stage a: its metric 'mine/x' cannot be logged: could not convert"),
        (lambda c, s: ({"a": s["x"]}, {"mine/x": s["x"]}), WorkerFailed, "stage a: its metric 'mine/x' cannot be logged"),
        (lambda c, s: ({"a": s["x"]}, {"critic/oops": 1.0}), WorkerFailed, "unknown metric 'critic/oops'.*prefix of your own"),
        (lambda c, s: ({"a": s["x"]}, {}, {}), WorkerFailed, r"a tuple that is not \(what it made, a mapping of metrics\)"),
        (lambda c, s: 1 / 0, WorkerFailed, "stage a of iteration 3 failed: ZeroDivisionError"),
        (lambda c, s: {"a": s["y"]}, EverstepError, r"\[y\].*no such tensor"),
        (lambda c, s: c.group.call("mesh", "logprobs"), EverstepError, "a stage on the lead cannot call workers"),
        (lambda c, s: time.sleep(30), DeadlineExceeded, r"stage a of iteration 3 has no result after 0.2 s \(recovery.call_timeout_s\)"),
    ],
)
def test_a_stage_that_does_not_do_what_it_declares_ends_the_run_with_its_name(function, error, says, tmp_path):
    conf = config(DEMO, tmp_path, *QUIET, "recovery.call_timeout_s=0.2")
    graph = Pipeline((source, stage("a", "x", "a", function)), (train,)).ordered()
    with pytest.raises(error, match=says):
        execute(graph, context(conf), Here(), samples_of(2), None)  # type: ignore[arg-type]


def test_metrics_of_a_stage_are_numbers_whatever_they_came_as(tmp_path):
    graph = Pipeline((source, stage("a", "x", "a", lambda c, s: ({"a": s["x"]}, {"mine/sum": s["x"].sum(), "mine/count": len(s)}))), (train,)).ordered()
    done = execute(graph, context(config(DEMO, tmp_path, *QUIET)), Here(), samples_of(2), None)  # type: ignore[arg-type]
    assert {type(value) for value in done.metrics.values()} == {float} and done.metrics["mine/count"] == 2.0


class Misnamed:
    metric_names = ("actor/pgloss",)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda c: 3, "it is a int, not an everstep.engine.loss.LossSpec"),
        (lambda c: c.nothing, "AttributeError"),
        (lambda c: LossSpec("tests.test_pipeline:Misnamed"), "unknown metric 'actor/pgloss'; did you mean 'actor/pg_loss'"),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused_before_workers_are_asked(loss, says, tmp_path):
    with pytest.raises(WorkerFailed, match=f"train of iteration 3: its loss cannot be used: .*{says}"):
        loss_of(dataclasses.replace(train, loss=loss), context(config(DEMO, tmp_path, *QUIET)))


# -- the record -----------------------------------------------------------------------------------------------------------------


def record(conf, iteration: int = 3, first_step: int = 20, updates: int = 8) -> IterationRecord:
    count, width = 32, 6
    generator = torch.Generator().manual_seed(iteration)
    tensors = {
        "input_ids": torch.randint(0, 9, (count, width), generator=generator), "attention_mask": torch.ones(count, width, dtype=torch.int64),
        "loss_mask": torch.ones(count, width), "scores": torch.rand(count, generator=generator),
        **{name: torch.rand(count, width, generator=generator) for name in ("advantages", "old_logprobs", "values", "returns", "rollout_logprobs")},
    }
    columns = {"completion": [f"é{i}" for i in range(count)], "record": [{"answer": object()}] * count, "prompt": [[{"role": "user", "content": "x"}]] * count}
    samples = TrainingBatch(tensors, columns, [f"0/{i}#0" for i in range(count)], [first_step] * count)
    return IterationRecord(iteration, first_step, updates, 4, settings_digest(conf), samples, {"critic/score/mean": 0.5})


def test_a_record_comes_back_bit_by_bit_without_the_datas_own_column(tmp_path):
    conf = config(PPO, tmp_path, *QUIET)
    records = IterationRecords(tmp_path / "iterations", tmp_path / "checkpoints")
    kept = record(conf)
    shared = {"mine": kept.samples["returns"], "view": kept.samples["returns"][:, 1:2].expand(-1, 6)}  # a stage of one's own may do so
    kept = dataclasses.replace(kept, samples=kept.samples.with_tensors(**shared))
    records.write(kept)
    notes: list[str] = []
    found = records.find(3, 20, settings_digest(conf), notes.append)
    assert found is not None and not notes
    columns = {name: values for name, values in kept.samples.columns.items() if name != "record"}
    assert found.samples.equal(TrainingBatch(kept.samples.tensors, columns, kept.samples.sample_ids, kept.samples.weight_versions))
    assert dataclasses.replace(found, samples=kept.samples) == kept


def test_a_record_of_another_moment_or_other_settings_is_not_used(tmp_path):
    conf = config(PPO, tmp_path, *QUIET)
    records = IterationRecords(tmp_path / "iterations", tmp_path / "checkpoints")
    records.write(record(conf))
    notes: list[str] = []
    assert records.find(3, 21, settings_digest(conf), notes.append) is None
    assert records.find(4, 20, settings_digest(conf), notes.append) is None
    assert not notes
    longer = config(PPO, tmp_path, *QUIET, "rl.iterations=99", "rl.eval_every=3", "optimizer.lr=1e-4", "critic.optimizer.lr=1e-4",
                    "reward.timeout_s=99", "reward.workers=5", "rollout.call_timeout_s=99", "rollout.samples_per_batch=3", "data.eval_source=null")
    assert records.find(3, 20, settings_digest(longer), notes.append) is not None
    other = config(PPO, tmp_path, *QUIET, "rl.updates_per_pass=4")
    assert records.find(3, 20, settings_digest(other), notes.append) is None
    assert "other settings" in notes[0]


@pytest.mark.parametrize("where", [0.05, 0.3, 0.6, 0.99])
def test_a_damaged_record_is_named_and_not_used(where, tmp_path):
    conf = config(PPO, tmp_path, *QUIET)
    records = IterationRecords(tmp_path / "iterations", tmp_path / "checkpoints")
    path = records.write(record(conf))
    data = bytearray(path.read_bytes())
    data[int(len(data) * where)] ^= 1
    path.write_bytes(data)
    notes: list[str] = []
    assert records.find(3, 20, settings_digest(conf), notes.append) is None
    assert len(notes) == 1 and str(path) in notes[0]


def test_records_are_deleted_once_nothing_leads_back_inside_them(tmp_path):
    conf = config(PPO, tmp_path, *QUIET)
    records = IterationRecords(tmp_path / "iterations", tmp_path / "checkpoints")
    for iteration, first in ((1, 4), (2, 12), (3, 20)):
        records.write(record(conf, iteration, first))
    (tmp_path / "iterations" / ".000009.safetensors.7.tmp").write_text("torn")
    left = lambda: sorted(path.name[:6] for path in (tmp_path / "iterations").iterdir())
    (tmp_path / "checkpoints" / "step-000012").mkdir(parents=True)  # at a boundary: needs none
    (tmp_path / "checkpoints" / "step-000007").mkdir()
    records.retire(3, 20)  # iteration 2 ends with step 20, and copies of later steps only are gone back to
    assert left() == ["000001", "000003"]
    (tmp_path / "checkpoints" / "step-000007").rmdir()
    records.write(record(conf, 2, 12))
    records.write(record(conf, 4, 28))  # of a step that is undone: it will be made again
    records.retire(3, 19)
    assert left() == ["000002", "000003"]
    records.retire(4, 28)
    assert left() == []


def test_what_json_would_change_is_refused(tmp_path):
    conf = config(PPO, tmp_path, *QUIET)
    records = IterationRecords(tmp_path / "iterations", tmp_path / "checkpoints")
    made = record(conf)
    for values, says in (([object()] * 32, "holds what JSON cannot"), ([(1, 2)] * 32, "would come back changed")):
        with pytest.raises(EverstepError, match=f"column odd .*{says}"):
            records.write(dataclasses.replace(made, samples=made.samples.with_columns(odd=values)))


# -- the transactions of an iteration --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overrides", [[], ["rl.passes=2"], ["critic.passes=3", "rl.updates_per_pass=4"], ["critic.warmup=3"]])
def test_whoever_goes_on_makes_the_very_transactions_that_are_left(overrides, tmp_path):
    conf = config(PPO, tmp_path, *QUIET, *overrides)
    graph = pipeline.resolve(conf)
    made = record(conf)
    whole = list(transactions(conf, graph, made, 0))
    actor, critic = ([t for t in whole if t.update.role == role] for role in ("actor", "critic"))
    per_pass = conf.rl.updates_per_pass
    assert len(critic) == (conf.critic.passes or conf.rl.passes) * per_pass
    assert len(actor) == (0 if conf.critic.warmup == 3 else conf.rl.passes * per_pass)
    assert [t.about for t in whole] == [t.about for t in (*actor, *critic)]
    used = [sample for t in whole for sample in t.batch.sample_ids]
    assert len(set(used)) == len(used) == 32 * (len(whole) // per_pass), "every use has its own id, and each pass uses each sample once"
    assert "record" not in whole[0].batch.columns
    for updates in (actor, critic):
        assert [t.last for t in updates] == [t is updates[-1] for t in updates]
        passes = [[s.rpartition("/")[2] for t in updates if t.rl_pass == n for s in t.batch.sample_ids] for n in {t.rl_pass for t in updates}]
        assert len(set(map(tuple, passes))) == len(passes), "each pass in an order of its own"
    for done in range(len(whole) + 1):
        rest = list(transactions(conf, graph, made, done))
        assert [(t.about, t.lr, t.last) for t in rest] == [(t.about, t.lr, t.last) for t in whole[done:]]
        assert all(mine.batch.equal(theirs.batch) for mine, theirs in zip(rest, whole[done:], strict=True))


def test_each_model_has_the_learning_rates_of_its_own_steps(tmp_path):
    conf = config(PPO, tmp_path, *QUIET, "optimizer.schedule=linear", "optimizer.lr=1.0", "optimizer.min_lr=0", "critic.optimizer.schedule=linear",
                  "critic.optimizer.lr=2.0", "rl.iterations=10", "critic.warmup=2")
    graph = pipeline.resolve(conf)
    rates: dict[str, list[float]] = {"actor": [], "critic": []}
    for iteration in range(1, 11):
        for t in transactions(conf, graph, record(conf, iteration), 0):
            rates[t.update.role].append(t.lr)
    assert rates["actor"] == pytest.approx([1.0 - n / 16 for n in range(1, 17)])
    assert rates["critic"] == pytest.approx([2.0 * (1.0 - n / 20) for n in range(1, 21)])
