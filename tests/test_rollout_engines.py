"""Rollout engines as processes of their own: whole GRPO runs whose final weights are those of a run in which ranks generate themselves."""

from __future__ import annotations

import multiprocessing as mp
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support.runs import DEMO, Finished, config, finish, gone
from tests.test_faults import assert_invariants
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from everstep.checkpoint.manifest import checkpoint_folders, step_of
from everstep.cluster.endpoint import ask
from everstep.cluster.forked import ForkedHost
from everstep.config.check import check_plan
from everstep.config.load import load_config
from everstep.data import SampleStream
from everstep.errors import ConfigError, NotEnoughReplicas, WorkerFailed
from everstep.plan import make_plan
from everstep.plan.terminal import size_rows
from everstep.rl import ahead
from everstep.rl.record import settings_digest
from everstep.rl.rollout import Sampling
from everstep.rl.rollout.decoding import Pending
from everstep.rl.rollout.transformers import TransformersRollout
from everstep.telemetry.events import Event, of_kind, read_events
from everstep.telemetry.history import check
from everstep.telemetry.metrics import read_metrics

SHORT = ["faults=[]", "warmup.steps=4", "rl.iterations=4", "rl.eval_every=2", "recovery.exact=true", "train.micro_batch_size=64",
         "warmup.samples_per_step=128", "rl.prompts_per_step=16", "layout.replicas=2", "layout.spares=1", "rollout.tokens_per_call=1",
         "recovery.heartbeat_s=0.2", "checkpoint.at_end=false", "rollout.samples_per_batch=64"]
ENGINES = ["rollout.engines=2", "rollout.call_timeout_s=20"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Finished:
    return finish(config(DEMO, tmp_path_factory.mktemp("ranks"), *SHORT), clean=True, host=ForkedHost)


def engines(folder: Path, *more: str, steps: int = 8) -> Finished:
    done = finish(config(DEMO, folder, *SHORT, *ENGINES, *more), clean=True, host=ForkedHost)
    assert_invariants(done, steps)
    assert gone(done.pids)
    return done


def test_engines_that_are_killed_while_they_generate_and_while_they_get_weights_change_nothing(tmp_path, undisturbed) -> None:
    """And a rank that dies while it serves weights. The final weights are those of a run without engines and without deaths."""
    faults = ["{step: 5, phase: generate, kind: kill, rank: 0}", "{step: 6, phase: sync, kind: kill, rank: 1}",
              "{step: 7, phase: send, kind: kill, replica: 0, rank: 0}", "{step: 8, phase: generate, kind: exit, rank: 0}"]
    done = engines(tmp_path, f"faults=[{', '.join(faults)}]")
    assert done.final_hashes == undisturbed.final_hashes
    assert len(done.kind("fault")) == 4 and len(done.kind("rollout_death")) == 3
    assert 3 >= len(done.kind("rollout_start")) >= 2, "of three deaths; the last one's successor may come when the run is over"
    assert sum(e["requeued"] for e in done.kind("rollout_death")) > 0 and not done.kind("drop")
    assert next(f for f in check(done.folder) if f.number == 10).held


def _second_engine_fails_twice() -> None:
    """Called first in every worker process, whose name is the worker's."""
    if mp.current_process().name in ("e1", "e1.1"):
        os._exit(3)


def _engines_fail() -> None:
    """The second one is on its way again when the first one fails."""
    name = mp.current_process().name
    if name.startswith("e"):
        time.sleep({"e0": 2.0, "e1.1": 4.0}.get(name, 0.0))
        os._exit(3)


def _only_the_first_engine_starts() -> None:
    if mp.current_process().name.startswith("e0."):
        os._exit(3)


def test_an_engine_that_does_not_start_is_tried_again_and_engines_come_and_go_while_the_run_goes_on(tmp_path, undisturbed) -> None:
    """And nothing of it shows in the final weights."""
    told = []

    def operator() -> None:
        def until(kind: str, true: Callable[[Event], bool]) -> None:
            end = time.monotonic() + 30
            while time.monotonic() < end and not any(map(true, happened(tmp_path, kind))):
                time.sleep(0.02)

        until("commit", lambda e: e.step == 5)
        told.append(ask(tmp_path, "engines", engines=3))
        until("rollout_made", lambda e: e.who.startswith("e2."))
        told.append(ask(tmp_path, "engines", engines=1))
        told.append(ask(tmp_path, "engines", engines=2))

    thread = threading.Thread(target=operator, daemon=True)
    thread.start()
    slow = "reward.function=tests.support.slow_reward:position_match"  # so that there is time for all this
    done = finish(config(DEMO, tmp_path, *SHORT, *ENGINES, slow), clean=True, host=lambda c: ForkedHost(c, prepare=_second_engine_fails_twice))
    thread.join(5)
    assert_invariants(done, 8)
    assert gone(done.pids) and done.final_hashes == undisturbed.final_hashes
    failed = done.kind("rollout_start_failed")
    assert [e["engine"] for e in failed][:2] == ["e1", "e1.1"] and [e["again_s"] for e in failed][:2] == [1.0, 2.0]
    later = {e["engine"] for e in failed[2:]}  # starts that an order, or the end of the run, called off
    assert not later & {e["engine"] for e in done.kind("rollout_start")}
    assert "could not start" in failed[0]["cause"] and not done.kind("rollout_death")
    assert len(told) == 3 and not told[0]["leaving"] and told[1]["engines"] == told[2]["engines"] == ["e0"], told
    left = [e["engine"] for e in done.kind("rollout_leave")]
    assert any(e["engine"].startswith("e2.") for e in done.kind("rollout_start")) and any(name.startswith("e2.") for name in left)
    assert max(e["seconds"] for e in done.kind("call") if e["method"] == "rollout") < 20, "nobody waits for an engine that left"


def happened(folder: Path, kind: str) -> list[Event]:
    return of_kind(read_events(folder / "events"), kind) if (folder / "events").is_dir() else []


@pytest.mark.parametrize(
    ("prepare", "more", "error", "why"),
    [
        (_engines_fail, [], WorkerFailed, "no rollout engine could start: e[01]: WorkerFailed: worker e[01] could not start"),
        (_only_the_first_engine_starts, ["rollout.engines=1", "rollout.engine_restarts=2", "faults=[{step: 5, phase: generate, kind: kill, rank: 0}]"],
         NotEnoughReplicas, r"no rollout engine is left, after 2 restarts .*the last one failed: e0\.2: WorkerFailed"),
    ],
    ids=["at-the-start", "later"],
)
def test_a_run_without_engines_ends_with_the_reason(tmp_path, prepare, more, error, why) -> None:
    conf = config(DEMO, tmp_path, *SHORT, *ENGINES, *more)
    with pytest.raises(error, match=why):
        finish(conf, clean=True, host=lambda c: ForkedHost(c, prepare=prepare))
    assert gone({e.pid for e in read_events(tmp_path / "events") if e.who != "lead"})


@pytest.mark.full
def test_an_idle_spares_device_generates_until_the_spare_is_needed(tmp_path, undisturbed) -> None:
    more = ["rollout.engines=1", "rollout.on_spares=true", "reward.function=tests.support.slow_reward:position_match",
            "faults=[{step: 7, phase: compute, kind: kill, replica: 1, rank: 0}]"]
    done = engines(tmp_path, *more)
    assert done.final_hashes == undisturbed.final_hashes
    [left] = done.kind("rollout_leave")
    [back] = [e for e in done.kind("form") if e.t_wall > done.kind("fault")[0].t_wall]
    assert left["engine"].startswith("e1002.") and any(e.who == left["engine"] for e in done.kind("rollout_made"))
    assert left.t_wall < back.t_wall, "it was gone before the spare took its place"
    assert not done.kind("rollout_death")


def _the_second_engine_is_slow() -> None:
    from everstep.rl.rollout.serving import EngineWorker

    if mp.current_process().name == "e1":
        advance = EngineWorker.advance

        def slowly(self, *order):
            time.sleep(2.5)
            return advance(self, *order)

        EngineWorker.advance = slowly


@pytest.mark.full
def test_idle_engines_go_on_with_what_a_slow_one_had_and_the_samples_are_the_same(tmp_path, undisturbed) -> None:
    done = finish(config(DEMO, tmp_path, *SHORT, *ENGINES), clean=True, host=lambda c: ForkedHost(c, prepare=_the_second_engine_is_slow))
    assert_invariants(done, 8)
    assert gone(done.pids) and done.final_hashes == undisturbed.final_hashes
    assert {e["engine"] for e in done.kind("rollout_moved")} == {"e1"} and not done.kind("rollout_death")
    assert max(e["seconds"] for e in done.kind("call") if e["method"] == "rollout") < 4 * 2.5, "four tokens by the slow one take longer"


DEADLY = "0/147#7"  # of the first iteration, by the seed


def _a_sequence_kills() -> None:
    """An engine that gets this sample dies, whichever engine it is."""
    from everstep.rl.rollout.decoding import Decoder

    add = Decoder.add

    def deadly(self, sequences, sampling):
        if DEADLY in {s.sample_id for s in sequences}:
            os._exit(9)
        add(self, sequences, sampling)

    Decoder.add = deadly


def test_a_sequence_that_kills_engines_is_given_up_and_recorded_and_all_others_are_trained(tmp_path) -> None:
    done = finish(config(DEMO, tmp_path, *SHORT, *ENGINES, "rl.iterations=2", "warmup.steps=2", "rollout.poison_after=1"), clean=True,
                  host=lambda c: ForkedHost(c, prepare=_a_sequence_kills))
    assert gone(done.pids)
    [dropped] = done.kind("rollout_dropped")
    assert dropped["samples"] == [DEADLY] and "2 rollout engines died while they generated it" in dropped["reason"]
    deaths = done.kind("rollout_death")
    assert len(deaths) == 2 >= len(done.kind("rollout_start")) >= 1, "poison_after=1: once among others, once alone"
    assert deaths[0]["requeued"] > 1 and deaths[1]["dropped"] == [DEADLY]
    assert DEADLY not in {s for e in done.kind("rollout_made") for s in e["samples"]}
    lengths = [row["response_length/min"] for row in read_metrics(tmp_path / "metrics.jsonl") if "response_length/min" in row]
    assert len(lengths) == 2 and all(length > 0 for length in lengths), "what was given up is no completion without length"
    assert len(done.kind("commit")) == 4 and not [f for f in check(tmp_path) if f.held is False]


@pytest.mark.full
def test_engines_that_freeze_hang_or_run_out_of_memory_are_replaced(tmp_path, undisturbed) -> None:
    faults = ["{step: 5, phase: generate, kind: stop, rank: 0}", "{step: 6, phase: generate, kind: hang, rank: 1}",
              "{step: 7, phase: generate, kind: oom, rank: 0}", "{step: 8, phase: sync, kind: gil, rank: 1}"]
    done = engines(tmp_path, f"faults=[{', '.join(faults)}]", "recovery.silence_s=3", "rollout.call_timeout_s=4", "rollout.sync_timeout_s=6")
    assert done.final_hashes == undisturbed.final_hashes
    assert len(done.kind("fault")) == 4 and len(done.kind("rollout_death")) == 4
    causes = " ".join(e["cause"] for e in done.kind("rollout_death"))
    assert "silent for 3 s" in causes and "rollout.call_timeout_s" in causes


@pytest.mark.full
@pytest.mark.parametrize("shape", [["layout.tp=2", "engine.sequence_parallel=true"], ["layout.pp=2"], ["layout.dp=2", "train.micro_batch_size=32"]])
def test_weights_reach_engines_from_every_layout(tmp_path, undisturbed, shape) -> None:
    ours = finish(config(DEMO, tmp_path / "ranks", *SHORT, *shape, "layout.spares=0"), clean=True, host=ForkedHost)
    done = engines(tmp_path / "engines", *shape, "layout.spares=0")
    assert done.final_hashes == ours.final_hashes


@pytest.mark.full
def test_with_lora_only_adapters_travel_after_the_first_time(tmp_path) -> None:
    done = engines(tmp_path, "lora.rank=4", "faults=[{step: 6, phase: generate, kind: kill, rank: 0}]")
    syncs = done.kind("rollout_sync")
    base = [e for e in syncs if e["kind"] == "base"]
    assert len(base) == 3, "two engines, and the one that replaced the dead one"
    assert {e["kind"] for e in syncs} == {"base", "adapter"} and max(e["nbytes"] for e in syncs if e["kind"] == "adapter") < base[0]["nbytes"] / 4


# -- the decoder -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rollout() -> TransformersRollout:
    tiny = Path(DEMO).parent / "models" / "tiny-qwen3"
    torch.manual_seed(0)
    hf = AutoConfig.from_pretrained(tiny)
    model = AutoModelForCausalLM.from_config(hf, dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(6)
    made = TransformersRollout(hf, AutoTokenizer.from_pretrained(tiny))
    made.load_weights(model.state_dict().items(), version=3)
    return made


SAMPLING = Sampling(max_response_tokens=9, samples_per_batch=5, seed=1)
PROMPTS = {f"s{i}": list(range(2, 4 + i % 4)) for i in range(12)}


def sequences() -> list[Pending]:
    return [Pending(sample, list(tokens)) for sample, tokens in PROMPTS.items()]


def finished(decoder, made: list[Pending], tokens: int) -> dict[str, list[int]]:
    gained: dict[str, list[int]] = {s.sample_id: list(s.made.tokens) for s in made}
    while len(decoder):
        for sample, (response, _) in decoder.advance(tokens).items():
            gained[sample] += response.tokens
    assert gained == {s.sample_id: s.made.tokens for s in made}
    return gained


def test_sequences_that_come_later_or_go_on_elsewhere_are_those_that_were_generated_in_one_go(rollout) -> None:
    whole = sequences()
    decoder = rollout.decoder()
    decoder.add(whole, SAMPLING)
    expected = finished(decoder, whole, 100)
    for tokens in (1, 2, 4):
        first, made = rollout.decoder(), sequences()
        first.add(made[:7], SAMPLING)
        first.advance(tokens)
        first.add(made[7:], SAMPLING)
        first.advance(tokens)
        second = rollout.decoder()  # another process, after the first one died
        second.add([s for s in made if not s.made.text and len(s.made.tokens) < SAMPLING.max_response_tokens], SAMPLING)
        finished(second, [s for s in made if s.sample_id in {w.sample_id for w in second._waiting}], tokens)
        assert {s.sample_id: s.made.tokens for s in made} == expected


def test_new_weights_in_the_middle_mark_each_token_and_cancelled_ones_are_gone(rollout) -> None:
    made = sequences()[:4]
    decoder = rollout.decoder()
    decoder.add(made, SAMPLING)
    decoder.advance(2)
    decoder.cancel({"s1"})
    weights = {name: p.clone() for name, p in rollout.model.named_parameters()}
    try:
        rollout.load_weights(((n, p * 1.1) for n, p in weights.items()), version=4)
        decoder.restart()
        while len(decoder):
            decoder.advance(3)
    finally:
        rollout.load_weights(weights.items(), version=3)
    for sequence in made:
        versions = sequence.made.versions
        if sequence.sample_id == "s1":
            assert versions == [3, 3]
        else:
            assert versions == sorted(versions) and len(versions) == len(sequence.made.tokens) and versions[:2] == [3, 3][: len(versions)]
    assert any(4 in s.made.versions for s in made)


def test_sequences_with_other_sampling_are_refused_while_some_are_decoded(rollout) -> None:
    decoder = rollout.decoder()
    decoder.add(sequences()[:1], SAMPLING)
    with pytest.raises(ValueError, match="sampled otherwise"):
        decoder.add(sequences()[1:2], Sampling(temperature=0.0))


def test_an_adapter_beside_frozen_weights_is_what_peft_would_merge(rollout) -> None:
    tiny = Path(DEMO).parent / "models" / "tiny-qwen3"
    mine = TransformersRollout(rollout.model.config, AutoTokenizer.from_pretrained(tiny))
    frozen = {name: p.clone() for name, p in rollout.model.named_parameters()}
    mine.load_weights(frozen.items(), version=None)
    assert mine.version is None
    module = "model.layers.0.self_attn.q_proj"
    out, into = frozen[f"{module}.weight"].shape
    a, b = torch.randn(2, into), torch.randn(out, 2)
    for version, factor in ((1, 1.0), (2, 3.0)):  # the second replaces the first
        mine.load_adapter([(f"{module}.lora_A.weight", a * factor), (f"{module}.lora_B.weight", b)], 0.5, version)
        expected = frozen[f"{module}.weight"] + 0.5 * factor * (b @ a)
        torch.testing.assert_close(dict(mine.model.named_parameters())[f"{module}.weight"].detach(), expected)
        assert mine.version == version


def test_the_samples_of_one_prompt_are_prefilled_once(rollout, monkeypatch) -> None:
    rows, decoder, forward = [], rollout.decoder(), rollout.model.forward
    monkeypatch.setattr(rollout.model, "forward", lambda *a, **k: (rows.append(len(k["input_ids"])), forward(*a, **k))[1])
    decoder.add([Pending(f"p{i}#{k}", [2, 3, 4 + i]) for i in range(2) for k in range(8)], Sampling(max_response_tokens=2, samples_per_batch=16))
    decoder.advance(1)
    assert rows[0] == 2


# -- generation ahead of training -------------------------------------------------------------------------------------------

AHEAD = ["rollout.max_staleness=1", "rl.importance.level=token", "rl.eval_every=0", "rl.iterations=5"]


def versions(done: Finished) -> list[float]:
    """How many optimizer steps the weights behind each iteration's samples were behind, on average."""
    return [row["rollout/staleness"] for row in read_metrics(done.folder / "metrics.jsonl") if "rollout/staleness" in row]


def test_samples_of_the_next_iteration_are_made_while_this_one_trains_and_a_dead_rank_changes_nothing(tmp_path) -> None:
    """One-step-off: every iteration but the first trains on samples of the weights before the last update, whoever dies."""
    fault = "faults=[{step: 6, phase: reduce, kind: kill, replica: 1, hold: true}]"
    done, disturbed = (engines(tmp_path / name, *AHEAD, *more, steps=9) for name, more in (("a", []), ("b", [fault])))
    assert versions(done) == versions(disturbed) == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert disturbed.kind("fault") and done.final_hashes == disturbed.final_hashes


@pytest.mark.full
@pytest.mark.parametrize("staleness", [1, 3])
def test_engines_that_die_while_they_generate_ahead_lose_nothing(tmp_path, staleness) -> None:
    faults = ["{step: 6, phase: generate, kind: kill, rank: 0}", "{step: 7, phase: sync, kind: kill, rank: 1}",
              "{step: 7, phase: apply, kind: kill, replica: 0}"]
    more = ["rl.iterations=8", f"rollout.max_staleness={staleness}", f"faults=[{', '.join(faults)}]"]
    done = engines(tmp_path, *AHEAD[1:3], *more, steps=12)
    assert len(done.kind("fault")) == 3 and not done.kind("drop")
    assert all(0 <= behind <= staleness for behind in versions(done))


@pytest.mark.full
def test_a_run_that_generates_ahead_resumes_with_what_engines_had_made(tmp_path) -> None:
    """In its order: what is trained on next was made by the weights of before the interruption, as it would have been without. Nothing is lost,
    nothing trained twice."""
    common = [*SHORT, *ENGINES, *AHEAD[:2], "rl.eval_every=0", "rl.eval_before=false", "checkpoint.every_steps=1", "optimizer.schedule=constant"]
    conf = config(DEMO, tmp_path, *common, "rl.iterations=6", "faults=[{step: 8, phase: compute, kind: error, replica: 0}]")
    with pytest.raises(WorkerFailed):
        finish(conf, clean=True, host=ForkedHost)
    batches = ahead.read(tmp_path / "iterations", 7, settings_digest(conf), pytest.fail)
    assert len(batches) == 1 and {v for response in batches[0].values() for v in response.versions} <= {5, 6}
    done = finish(config(DEMO, tmp_path, *common, "rl.iterations=6", "resume=auto"), host=ForkedHost)
    assert_invariants(done, 10)
    assert versions(done)[-2:] == [1.0, 1.0] and len(versions(done)) == 6
    standing = {commit.step: commit for commit in done.kind("commit") if commit.step > 4}  # the last one of each step: a checkpoint may have been behind
    used = [sample.rsplit("/", 2)[1:] for commit in standing.values() for sample in commit["samples"]]
    assert len(used) == len({tuple(u) for u in used}) == 6 * 16 * 16
    ahead.retire(tmp_path / "iterations", tmp_path / "checkpoints", 10)  # a checkpoint may have been deleted after the run had looked
    saved = {step_of(folder) for folder in checkpoint_folders(tmp_path / "checkpoints")}
    assert {int(path.stem[6:]) for path in (tmp_path / "iterations").glob("ahead-*.json")} <= saved


@pytest.mark.full
@pytest.mark.parametrize("phase", ["compute", "reward"])
def test_one_replica_that_goes_back_skips_no_prompt_that_had_been_drawn_ahead(phase, tmp_path) -> None:
    """After a rollback to a copy in memory every iteration trains on the prompts that follow those of the one before: what engines were at
    for later iterations is drawn again. In ``reward`` nobody calls the rank that dies: whoever sends weights next finds nobody who has them. No
    engine pays for it."""
    more = ["layout.replicas=1", "recovery.memory_checkpoint_every=1", "rollout.engines=1", "rl.iterations=5", "rollout.engine_restarts=0",
            f"faults=[{{step: 7, phase: {phase}, kind: kill, replica: 0}}]"]
    done = engines(tmp_path, *AHEAD[:2], "rl.eval_every=0", "rl.eval_before=false", *more, steps=9)
    (rolled,) = done.kind("rollback")
    assert rolled.step == 6 and "the copy in memory" in rolled["cause"]
    standing = {commit.step: commit["samples"] for commit in done.kind("commit") if commit.step > 4}
    stream = SampleStream(576, 0)  # of the training prompts of the demonstration, whose seed is 0
    for step, samples in sorted(standing.items()):
        assert {sample.split("/", 2)[2].partition("#")[0] for sample in samples} == {ref.id for ref in stream.take(16)}, step


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["rollout.max_staleness=1"], "without rollout.engines nobody generates while ranks train"),
        (["rollout.engines=1", "rollout.max_staleness=1"], "rl.importance corrects for"),
        (["rollout.engines=1", "rollout.max_staleness=1", "rl.dynamic_sampling_rounds=2"], "knows how many this one takes"),
        (["rollout.engines=1", "launcher=local", "layout.replicas=1", "layout.spares=0"], "has no place for rollout.engines=1"),
        (["rollout.engines=1", "rollout.sync_timeout_s=1e6"], "must be less than recovery.step_timeout_s"),
        (["rollout.engines=1", "faults=[{step: 70, phase: generate, rank: 1}]"], r"faults\.0\.rank=1 does not exist; rollout.engines=1"),
        (["faults=[{step: 70, phase: send}]"], "without rollout.engines nobody serves weights"),
        (["rollout.engines=1", "faults=[{step: 70, phase: rollout}]"], "ranks do not generate with rollout.engines"),
    ],
)
def test_what_engines_cannot_do_is_refused(tmp_path, more, why) -> None:
    with pytest.raises(ConfigError, match=why):
        check_plan(config(DEMO, tmp_path, "faults=[]", *more), {})


@pytest.mark.full
def test_engines_as_ray_actors(tmp_path, undisturbed) -> None:
    faults = ["{step: 5, phase: generate, kind: kill, rank: 0}", "{step: 7, phase: generate, kind: stop, rank: 1}"]
    done = finish(config(DEMO, tmp_path, *SHORT, *ENGINES, "recovery.silence_s=5", f"faults=[{', '.join(faults)}]"), clean=True)
    assert_invariants(done, 8)
    assert done.final_hashes == undisturbed.final_hashes
    assert len(done.kind("rollout_death")) == 2 and done.kind("rollout_start"), "the second one may come when the run is over"


def test_plan_counts_engines(tmp_path) -> None:
    planned = load_config(DEMO, [f"run_dir={tmp_path}", "device=cpu", "rollout.engines=2", "rollout.max_staleness=1", "rl.importance.level=token"])
    rows = dict(size_rows(make_plan(planned, {})))
    assert "2 rollout engines: 5 processes" in rows["ranks"] and "up to 1 iteration ahead" in rows["generation"]
