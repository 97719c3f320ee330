"""Semi-synchronous training as whole runs: real processes, real signals, and what the history checker says.

Deaths leave no trace of when they came: with the same replica dead in the same round, survivors make the same inner steps, whatever
it was doing when it died, and end with the same bits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support import launchers
from tests.support.models import like_example
from tests.support.runs import DEMO, ROOT, SFT, Finished, gone
from transformers import AutoModelForCausalLM

from everstep.checkpoint import manifest
from everstep.checkpoint.index import Index
from everstep.checkpoint.sharded import whole_tensor
from everstep.errors import LinkBroken
from everstep.recovery import semisync
from everstep.telemetry.history import check
from everstep.telemetry.metrics import read_metrics
from everstep.telemetry.recoveries import account

pytestmark = [pytest.mark.timeout(300)]

ROUNDS, INNER = 4, 3
SMALL = ["sft.samples_per_step=24", "train.micro_batch_size=4", "train.verify_every=1", "recovery.heartbeat_s=0.2", "optimizer.schedule=constant",
         "optimizer.warmup_steps=0", "checkpoint.at_end=false"]
DILOCO = [*SMALL, "semisync.method=diloco", f"semisync.sync_every={INNER}", f"sft.steps={ROUNDS * INNER}"]
STREAMING = [*SMALL, "semisync.method=streaming_diloco", "semisync.sync_every=6", "semisync.fragments=2", "semisync.fragment_sync_delay=1",
             "semisync.fragment_update_alpha=0.5", f"sft.steps={ROUNDS * INNER}"]


BOTH = ["controller", pytest.param("lighthouse", marks=pytest.mark.full)]  # launchers


def trained(folder: Path, *overrides: str, file: str = SFT, launcher: str = "controller", prepare: Callable[[], None] | None = None) -> Finished:
    return launchers.trained(launcher, file, folder, *overrides, prepare=prepare)


def assert_sound(run: Finished, rounds: int = ROUNDS) -> None:
    findings = check(run.folder)
    assert not [f for f in findings if f.held is False], findings
    assert all(f.held for f in findings if f.number not in (7, 10)), findings  # not every run writes a checkpoint, or has engines
    assert 11 in [f.number for f in findings]
    books = account(run.events)
    assert books.exact and books.committed == rounds and books.samples_dropped == 0
    assert gone(run.pids)


def fault(phase: str, replica: int, step: int = 2, kind: str = "kill", rank: int = 0) -> str:
    held = kind == "kill"
    return (f"faults=[{{step: {step}, phase: {phase}, kind: {kind}, replica: {replica}, rank: {rank}, hold: {str(held).lower()}, "
            f"delay_s: {0.005 if held else 0}}}]")


# -- against plain arithmetic ----------------------------------------------------------------------------------------------------


def saved(run: Finished, replica: int | None = None) -> dict[str, torch.Tensor]:
    """The state in the last checkpoint, as whole tensors: what all share, and what an island (None: the first) has for itself."""
    last = manifest.pointed_at(run.folder / "checkpoints")
    assert last is not None and not manifest.damage(last)
    index = Index(last)
    return {
        name: whole_tensor(index, f"{part}/{name}")
        for part in ("model", f"island-{replica or 0}") for name in index.names(part)
    }


def part(state: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(kind): t for name, t in state.items() if name.startswith(kind)}


@pytest.mark.full
def test_a_round_is_what_the_paper_says(tmp_path):
    """One round of two replicas against each replica's inner steps made alone, in runs of one replica on that replica's samples."""
    same = [*SMALL, "checkpoint.at_end=true", "sft.steps=3", "data.shuffle=false"]
    both = trained(tmp_path / "both", *same, "semisync.method=diloco", "semisync.sync_every=3")
    start = trained(tmp_path / "start", *same, "sft.steps=1", "semisync.method=diloco", "semisync.sync_every=1", "optimizer.lr=1e-30", "layout.replicas=1")
    alone = [trained(tmp_path / f"alone{r}", *same, "layout.replicas=1", "sft.samples_per_step=12",
                     f"data.source=tests.test_islands:half_{r}") for r in range(2)]
    before, after = part(saved(start), "global/"), saved(both)
    for name, g in before.items():
        moved = [g.double() - part(saved(run), "param/")[name].double().reshape(g.shape) for run in alone]
        mean = (moved[0] + moved[1]) / 2
        assert not torch.equal(moved[0], moved[1])
        torch.testing.assert_close(after[f"momentum/{name}"].double(), mean, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(after[f"global/{name}"].double(), g.double() - 0.7 * (1 + 0.9) * mean, rtol=1e-4, atol=1e-6)
        assert torch.equal(after[f"global/{name}"].reshape(-1), after[f"param/{name}"].reshape(-1))
    other = saved(both, replica=1)
    assert all(torch.equal(after[n], other[n]) for n in after if n.startswith(("global/", "momentum/", "param/")))
    assert any(not torch.equal(after[n], other[n]) for n in after if n.startswith("exp_avg/"))  # islands


def _half(which: int) -> list[dict[str, Any]]:
    """What replica ``which`` of two is dealt of every step: each second slot of 4 of 24 samples."""
    from everstep.data.arithmetic import texts

    return [record for i, record in enumerate(texts()) if i // 4 % 2 == which]


def half_0() -> list[dict[str, Any]]:
    return _half(0)


def half_1() -> list[dict[str, Any]]:
    return _half(1)


# -- deaths ----------------------------------------------------------------------------------------------------------------------


def final(run: Finished) -> set[str]:
    last = run.kind("verify")[-1]
    assert last["equal"]
    return set(last["hashes"].values())


PHASES = ("compute", "exchange", "reduce", "vote")


def test_survivors_end_with_the_same_bits_whatever_the_dead_replica_was_doing(tmp_path):
    """Three replicas, one killed in round 2 without a spare, in an inner step, before, in and after the sum: its samples are re-dealt."""
    hashes = {}
    for phase in PHASES[::2]:
        run = trained(tmp_path / phase, *DILOCO, "layout.replicas=3", fault(phase, 1))
        assert_sound(run)
        assert run.kind("fault")[0]["phase"] == phase
        salvaged = [e for e in run.kind("computed") if e["salvage"]]
        lost = {s for s in range(6 * INNER) if s % 3 == 1}
        assert {s for e in salvaged for s in e["slots"]} == lost and {e.step for e in salvaged} == {2}
        again = [e for e in run.kind("inner_step") if e.step == 2 and lost & set(e["slots"]) and e["replica"] != 1]
        assert len(again) == 2 * INNER  # each survivor makes one more step of each inner step
        hashes[phase] = final(run)
    assert len(set.union(*hashes.values())) == 1, hashes


@pytest.mark.full
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("launcher", "replica"), [("controller", 0), ("controller", 1), ("controller", 2), ("lighthouse", 0)])
@pytest.mark.parametrize("how", [DILOCO, STREAMING], ids=["diloco", "streaming"])
def test_any_replica_may_die_at_any_moment(phase, launcher, replica, how, tmp_path):
    assert_sound(trained(tmp_path, *how, "layout.replicas=3", fault(phase, replica), launcher=launcher))


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", ["lighthouse", "torchrun"])
def test_without_ray_an_island_that_died_comes_back(launcher, tmp_path):
    """Its samples of the round are trained on by the other; it begins again where the other is, and then makes steps of its own."""
    rounds = 20 if launcher == "lighthouse" else 250
    run = trained(tmp_path, *DILOCO, f"sft.steps={rounds * INNER}", "layout.replicas=2", fault("compute", 1), launcher=launcher)
    assert_sound(run, rounds)
    (join,) = run.kind("join")
    assert join["replica"] == 1 and [e for e in run.kind("computed") if e["salvage"] and e.step == 2]
    assert [e for e in run.kind("inner_step") if e["replica"] == 1 and e.step > join.step + 1]


@pytest.mark.full
@pytest.mark.parametrize("shape", [
    pytest.param(["layout.tp=2", "engine.sequence_parallel=true"], id="tp2"), pytest.param(["layout.pp=2"], id="pp2"),
])
def test_a_replica_that_lost_a_rank_comes_back_whole_from_one_island(shape, tmp_path):
    """The living rank of the broken replica brings nothing along: both ranks begin where one other island is. Streaming, so that local
    weights differ between replicas."""
    more = [f"sft.steps={12 * INNER}"]
    run = trained(tmp_path, *STREAMING, *more, *shape, "layout.spares=1", fault("reduce", 1, rank=1))
    assert_sound(run, rounds=12)
    (join,) = run.kind("join")
    assert join["members"] == [0, 1]
    healed = run.kind("heal_done")
    assert {(e["replica"], e["rank"], e["source"]) for e in healed} == {(1, 0, 0), (1, 1, 0)}
    assert all(e["heal_bytes"] > 0 for e in healed)
    after = [e for e in run.kind("inner_step") if e.step > join.step and e["replica"] == 1]
    assert {e["rank"] for e in after} == {0, 1}


@pytest.mark.full
def test_a_joiner_does_not_count_in_its_first_round(tmp_path):
    """It heals at the boundary and sends zeros: the mean is over those that made inner steps, so its peer alone decides that round."""
    run = trained(tmp_path, *DILOCO, f"sft.steps={10 * INNER}", "layout.spares=1", fault("compute", 1))
    assert_sound(run, rounds=10)
    first = min(e.step for e in run.kind("heal_done") if e["replica"] == 1) + 1
    assert not [e for e in run.kind("inner_step") if e.step == first and e["replica"] == 1]
    assert any(e.step == first and e["replica"] == 1 for e in run.kind("apply"))
    assert [e for e in run.kind("inner_step") if e.step == first + 1 and e["replica"] == 1]


def drop(rows: list[dict[str, Any]], at: int) -> None:
    del rows[at]


def twice(rows: list[dict[str, Any]], at: int) -> None:
    rows.insert(at, dict(rows[at]))


def elsewhere(rows: list[dict[str, Any]], at: int) -> None:
    rows[at]["slots"] = [slot + 1 for slot in rows[at]["slots"]]


def out_of_order(rows: list[dict[str, Any]], at: int) -> None:
    rows[at]["inner"], rows[at + 1]["inner"] = rows[at + 1]["inner"], rows[at]["inner"]


def test_the_checker_notices_inner_steps_that_do_not_fit(tmp_path):
    run = trained(tmp_path, *DILOCO, "sft.steps=6")
    log = run.folder / "events" / "w1.jsonl"
    real = log.read_text()
    rows = [json.loads(line) for line in real.splitlines()]
    at = next(i for i, row in enumerate(rows) if row["event"] == "inner_step" and row["step"] == 2)
    for change in (drop, twice, elsewhere, out_of_order):
        changed = [dict(row) for row in rows]
        change(changed, at)
        log.write_text("".join(json.dumps(row) + "\n" for row in changed))
        assert 11 in {f.number for f in check(run.folder) if f.held is False}, change.__name__
    log.write_text(real)
    assert_sound(run, rounds=2)


@pytest.mark.full
def test_with_retry_survivors_go_back_to_the_last_commit_and_make_the_round_anew(tmp_path):
    """What they had moved, and their moments, is forgotten: the same bits whenever in the round the replica died."""
    hashes = set()
    for phase in ("compute", "reduce"):
        run = trained(tmp_path / phase, *STREAMING, "recovery.mode=retry", "layout.replicas=3", fault(phase, 1))
        assert_sound(run)
        assert len({e["deal"] for e in run.kind("computed") if e.step == 2 and e["replica"] == 0}) == 2
        assert not [e for e in run.kind("computed") if e["salvage"]]
        hashes |= final(run)
    assert len(hashes) == 1


# -- failed rounds -----------------------------------------------------------------------------------------------------------------


def a_link_that_breaks_once() -> None:
    """In round 2 the sum of replica 0 fails, with every process alive."""
    add = semisync.RoundLedger._add

    def breaking(self: semisync.RoundLedger, link: Any, *rest: Any) -> list[torch.Tensor]:
        breaking.calls += 1  # type: ignore[attr-defined]
        if breaking.calls == 2 and os.environ["EVERSTEP_REPLICA"] == "0":  # type: ignore[attr-defined]
            raise LinkBroken("injected: the sum of round 2")
        return add(self, link, *rest)

    breaking.calls = 0  # type: ignore[attr-defined]
    semisync.RoundLedger._add = breaking  # type: ignore[method-assign]


@pytest.mark.parametrize("how", [DILOCO, pytest.param(STREAMING, marks=pytest.mark.full)], ids=["diloco", "streaming"])
@pytest.mark.parametrize("launcher", BOTH)
def test_a_synchronisation_that_fails_is_made_again_and_no_inner_step_is_lost(launcher, how, tmp_path):
    calm = trained(tmp_path / "calm", *how)
    run = trained(tmp_path / "flap", *how, launcher=launcher, prepare=a_link_that_breaks_once)
    assert_sound(run)
    assert run.kind("void") or how is STREAMING  # sent ahead, it is merely given up
    assert len(run.kind("inner_step")) == ROUNDS * INNER * 2
    assert final(run) == final(calm)


@pytest.mark.full
def test_a_round_that_is_not_finite_is_made_again_and_leaves_nothing_behind(tmp_path):
    """The islands go back to the last commit, optimizer state included, and make the same steps: the same bits as without the fault."""
    calm = trained(tmp_path / "calm", *STREAMING)
    run = trained(tmp_path / "nan", *STREAMING, fault("compute", 1, kind="nan"))
    assert_sound(run)
    assert any("non-finite" in e["cause"] for e in run.kind("view"))
    assert final(run) == final(calm)


def test_a_round_that_is_not_finite_twice_is_skipped_and_restores_the_last_commit(tmp_path):
    """As if the round had not been: every bit of every island is that of a run which ends before it."""
    nan = "{step: 3, phase: compute, kind: nan, replica: 1}"
    run = trained(tmp_path / "skip", *STREAMING, "sft.steps=9", "checkpoint.at_end=true", f"faults=[{nan}, {nan}]")
    assert_sound(run, rounds=3)
    assert [c["kind"] for c in run.kind("commit")] == ["apply", "apply", "skip"]
    assert len(run.kind("commit")[2]["samples"]) == 24 * INNER
    before = trained(tmp_path / "before", *STREAMING, "sft.steps=6", "checkpoint.at_end=true")
    for replica in (None, 1):
        one, two = saved(run, replica), saved(before, replica)
        assert all(torch.equal(one[name], two[name]) for name in one)


def at_the_end_only() -> None:
    """Nothing is sent while inner steps go on."""
    semisync.RoundLedger.send_ahead = lambda self, moved: None  # type: ignore[method-assign]


def one_replica_at_the_end_only() -> None:
    """Replica 1 sends nothing ahead, so what replica 0 sent must be given up."""
    send = semisync.RoundLedger.send_ahead
    semisync.RoundLedger.send_ahead = (  # type: ignore[method-assign]
        lambda self, moved: send(self, moved) if os.environ["EVERSTEP_REPLICA"] == "0" else None
    )


def lost_by_one_replica() -> None:
    """Replica 1 got no total, so the one that replica 0 has must not be used."""
    run = semisync.Ahead._run

    def losing(self: semisync.Ahead) -> None:
        run(self)
        if os.environ["EVERSTEP_REPLICA"] == "1":
            self._total = None

    semisync.Ahead._run = losing  # type: ignore[method-assign]


@pytest.mark.full
@pytest.mark.parametrize("prepare", [lost_by_one_replica, at_the_end_only, one_replica_at_the_end_only])
def test_what_is_sent_ahead_is_what_would_be_sent_at_the_end(prepare, tmp_path):
    ahead = trained(tmp_path / "ahead", *STREAMING)
    assert_sound(ahead)
    sent = ahead.kind("sent_ahead")
    assert sorted((e.step, e["replica"], e["inner"]) for e in sent) == [(s, r, INNER - 1) for s in range(1, ROUNDS + 1) for r in range(2)]
    made = {(e.step, e["replica"]): e.t_mono for e in ahead.kind("inner_step") if e["inner"] == INNER - 1}
    assert all(e.t_mono < made[e.step, e["replica"]] for e in sent)
    late = trained(tmp_path / "late", *STREAMING, prepare=prepare)
    assert_sound(late)
    assert final(late) == final(ahead)


# -- checkpoints -------------------------------------------------------------------------------------------------------------------


def test_a_resumed_run_ends_with_every_bit_of_an_uninterrupted_one(tmp_path):
    """Local weights and moments of every island included; they differ between replicas."""
    whole = trained(tmp_path / "whole", *STREAMING, "checkpoint.at_end=true")
    trained(tmp_path / "parts", *STREAMING, "sft.steps=6", "checkpoint.at_end=true")
    parts = trained(tmp_path / "parts", *STREAMING, "checkpoint.at_end=true", "resume=must")
    for replica in (None, 1):
        one, two = saved(whole, replica), saved(parts, replica)
        assert set(one) == set(two) and all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(saved(whole)[name], saved(whole, 1)[name]) for name in saved(whole) if name.startswith("param/"))
    # What others load are the global weights, not those of the replica that happened to write.
    last = manifest.pointed_at(whole.folder / "checkpoints")
    assert last is not None
    embedding = AutoModelForCausalLM.from_pretrained(last / "hf").model.embed_tokens.weight
    name = "model.embed_tokens.weight"
    assert torch.equal(embedding, saved(whole)[f"global/{name}"]) and not torch.equal(embedding, saved(whole)[f"param/{name}"])


# -- every layout ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [
    pytest.param(["layout.pp=2", "layout.vpp=2", "model.path={deep}"], id="vpp2"),  # two model parts on each rank
    pytest.param(["layout.pp=2", "layout.tp=2", "engine.sequence_parallel=true"], id="tp2-pp2", marks=pytest.mark.full),
    pytest.param(["layout.dp=2", "train.micro_batch_size=2"], id="dp2", marks=pytest.mark.full),
    pytest.param(["layout.cp=2"], id="cp2", marks=pytest.mark.full),
    pytest.param(["layout.dp=2", "layout.ep=2", "train.micro_batch_size=2", "model.path={moe}"], id="ep2", marks=pytest.mark.full),
    pytest.param(["lora.rank=4", "model.dtype=bfloat16"], id="lora-bf16", marks=pytest.mark.full),
])
@pytest.mark.parametrize("launcher", BOTH)
def test_every_part_of_the_model_is_synchronised(launcher, shape, tmp_path):
    """Under each inner layout the global weights are those of the plain one, within rounding, and every one of them moved."""
    deep = like_example(tmp_path / "deep", num_hidden_layers=4, layer_types=["full_attention"] * 4)
    names = {"deep": str(deep), "moe": str(ROOT / "examples" / "models" / "tiny-qwen3-moe")}
    shape = [s.format(**names) if "{" in s else s for s in shape]
    run = trained(tmp_path / "cut", *DILOCO, *shape, "checkpoint.at_end=true", launcher=launcher)
    assert_sound(run)
    last = manifest.pointed_at(run.folder / "checkpoints")
    assert last is not None
    index = Index(last)
    assert {n.removeprefix("momentum/") for n in index.names("model") if n.startswith("momentum/")} == \
        {n.removeprefix("exp_avg/") for n in index.names("island-0") if n.startswith("exp_avg/")}
    moved = {}  # by the rectangles in which ranks wrote it
    for path in (last / "state").glob("*.safetensors"):
        moved |= {name: bool(t.abs().max() > 0) for name, t in load_file(path).items() if name.startswith("model/momentum/") and t.numel()}
    never_read = "model/momentum/model.embed_tokens.weight[64:128,"  # with tp=2, the half of the vocabulary that no text of digits has
    assert len(moved) > 20 and all(did or name.startswith(never_read) for name, did in moved.items()), [n for n, did in moved.items() if not did]
    assert {tuple(map(int, p.name.split("-")[1].split("."))) for p in (last / "state").glob("*.safetensors")} == \
        {(replica, rank) for replica in (0, 1) for rank in range(run.kind("form")[0]["world_size"])}


# -- bytes -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["controller", "lighthouse"])
def test_a_round_sends_what_one_synchronous_step_sends_and_quantised_a_quarter(launcher, tmp_path):
    """Bytes over the link for an inner step, from the metrics of runs of the same model."""
    per_step = {}
    for name, overrides in {
        "synchronous": [*SMALL, "sft.steps=6"],
        "diloco": [*DILOCO, "sft.steps=6"],
        "quantised": [*DILOCO, "sft.steps=6", "semisync.should_quantize=true"],
    }.items():
        run = trained(tmp_path / name, *overrides, launcher=launcher)
        per_step[name] = [row["ft/link_bytes_per_inner_step"] for row in read_metrics(run.folder / "metrics.jsonl")]
    synchronous = per_step["synchronous"][-1]
    assert len(set(per_step["synchronous"])) == 1 and synchronous > 300_000
    assert all(x == pytest.approx(synchronous / INNER, rel=0.01) for x in per_step["diloco"])
    assert all(x == pytest.approx(synchronous / INNER * (1 + 4 / 256) / 4, rel=0.02) for x in per_step["quantised"])


# -- GRPO --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", BOTH)
def test_grpo_islands_make_rollouts_of_their_own_and_one_of_them_dies(launcher, tmp_path):
    """Each prompt's group is generated, scored and trained on by one replica; after a death its prompts are re-dealt.

    A user's reward has processes of its own on each island, the same ones in every inner step."""
    (scorers := tmp_path / "scorers").mkdir()
    run = trained(tmp_path, "semisync.method=diloco", "semisync.sync_every=2", "warmup.steps=4", "rl.iterations=6", "rl.prompts_per_step=6",
                  "rl.samples_per_prompt=4", "train.micro_batch_size=8", "warmup.samples_per_step=24", "layout.spares=0", "layout.replicas=3", "rl.kl_coef=0.01",
                  "reward.function=tests.support.noted_reward:noted", f"reward.args={{folder: {scorers}}}", "reward.workers=1", f"env.PYTHONPATH={ROOT}",
                  "rollout.eval_samples=8", "train.verify_every=1", "checkpoint.at_end=false", fault("compute", 2, step=4), file=DEMO,
                  launcher=launcher)
    assert_sound(run, rounds=5)
    assert [e for e in run.kind("computed") if e["salvage"] and e.step == 4]
    assert not [e for e in run.kind("call") if e["method"] == "generate" and e.t_wall > run.kind("commit")[2].t_wall and
                e.t_wall < run.kind("commit")[-1].t_wall]  # rollouts are the islands' own business
    rows = read_metrics(run.folder / "metrics.jsonl")
    assert [row.get("training/iteration") for row in rows] == [None, None, 2.0, 4.0, 6.0]
    assert all(0 <= row["critic/score/mean"] <= 1 and row["response_length/mean"] > 0 and row["actor/kl_loss"] >= 0 for row in rows[2:])
    samples = [s for c in run.kind("commit")[2:] for s in c["samples"]]
    assert len(samples) == 6 * 6 * 4 == len(set(samples))
    noted = {int(scorer.name) for scorer in scorers.iterdir()}
    assert 3 <= len(noted) <= 4 and gone(noted), "one on each island; and the evaluation's"
