"""Rollouts by vLLM: what everstep says to it, with a strict stand-in (tests/support/fake_vllm), and with the real one on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.fake_vllm import FOLDER, install
from tests.support.runs import DEMO, Finished, config, finish, gone
from tests.test_faults import assert_invariants
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from everstep.cluster.forked import ForkedHost
from everstep.config.check import check_plan
from everstep.config.rl_schema import RolloutConfig
from everstep.errors import ConfigError, LinkBroken, WorkerFailed
from everstep.rl.rollout import Sampling
from everstep.rl.rollout.decoding import Pending
from everstep.telemetry.history import check

TINY = Path(DEMO).parent / "models" / "tiny-qwen3"
VLLM = ["rollout.engine=vllm", "rollout.engines=2", "recovery.exact=false", "rollout.tokens_per_call=3", "rollout.call_timeout_s=20"]
SHORT = ["faults=[]", "warmup.steps=2", "rl.iterations=3", "rl.eval_every=0", "train.micro_batch_size=32", "warmup.samples_per_step=128",
         "rl.prompts_per_step=8", "rl.samples_per_prompt=8", "layout.replicas=2", "layout.spares=0", "recovery.heartbeat_s=0.2", "checkpoint.at_end=false"]


@pytest.fixture
def stand_in(monkeypatch) -> Iterator[None]:
    """vLLM is the stand-in, in this process."""
    monkeypatch.setattr(sys, "path", [FOLDER, *sys.path])
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY), dtype=torch.float32).requires_grad_(False)
    for p in made.parameters():
        if p.dim() == 2:
            p.mul_(6)
    return made


def weights(model: torch.nn.Module, factor: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    return [(name, p * factor) for name, p in model.named_parameters()]


def engine(folder: Path, adapted: tuple[str, ...] = (), **rollout):
    from everstep.rl.rollout.vllm import VllmRollout

    return VllmRollout(RolloutConfig(engine="vllm", engines=1, **rollout), AutoConfig.from_pretrained(TINY), AutoTokenizer.from_pretrained(TINY),
                       torch.float32, 32, adapted, 0, folder)


def sequences(count: int = 6) -> list[Pending]:
    return [Pending(f"s{i}", list(range(2, 4 + i % 4))) for i in range(count)]


def completed(rollout, sampling: Sampling, made: list[Pending] | None = None, tokens: int = 4) -> dict[str, list[int]]:
    made, running = made or sequences(), rollout.decoder()
    running.restart()  # as after every change of weights
    running.add(made, sampling)
    told = {s.sample_id: list(s.made.tokens) for s in made}
    while len(running):
        for sample, (piece, _) in running.advance(tokens).items():
            told[sample] += piece.tokens
    assert told == {s.sample_id: s.made.tokens for s in made}
    return told


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_come_with_the_models_log_probabilities_at_the_sampling_temperature(stand_in, tmp_path, model, temperature) -> None:
    rollout, made = engine(tmp_path, temperature=temperature), sequences(40)
    rollout.load_weights(weights(model), 3)
    completed(rollout, Sampling(temperature, max_response_tokens=9, seed=1), made)
    assert len({len(s.made.tokens) for s in made}) > 1, "some end by themselves"
    for sequence in made:
        said = sequence.made
        logits = model(input_ids=torch.tensor([sequence.prompt + said.tokens])).logits[0, len(sequence.prompt) - 1 : -1]
        expected = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(said.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(said.logprobs), expected, atol=1e-4, rtol=0)
        assert said.versions == [3] * len(said.tokens) and said.finished == (said.tokens[-1] in rollout._eos)
        assert len(said.tokens) <= 9 and said.text == rollout._text(said.tokens)


def test_a_sample_is_made_again_as_it_was_and_goes_on_elsewhere_from_what_it_has(stand_in, tmp_path, model) -> None:
    rollout, sampling = engine(tmp_path), Sampling(max_response_tokens=9, seed=1)
    rollout.load_weights(weights(model), 3)
    first = completed(rollout, sampling)
    assert first == completed(rollout, sampling) == completed(rollout, sampling, tokens=1)
    assert first != completed(rollout, Sampling(max_response_tokens=9, seed=2))
    broken, other = sequences(), rollout.decoder()
    other.add(broken, sampling)
    other.advance(3)
    had = {s.sample_id: list(s.made.tokens) for s in broken}
    assert any(had.values())
    again = engine(tmp_path / "other")  # after its engine died
    again.load_weights(weights(model), 3)
    left = [s for s in broken if s.sample_id in other._running]
    done = completed(again, sampling, left)
    assert left and all(done[s.sample_id][: len(had[s.sample_id])] == had[s.sample_id] for s in left)


def test_new_weights_in_the_middle_mark_each_token_and_the_cache_of_the_old_ones_is_dropped(stand_in, tmp_path, model) -> None:
    rollout, made = engine(tmp_path), sequences()
    rollout.load_weights(weights(model), 3)
    running = rollout.decoder()
    running.restart()
    running.add(made, Sampling(max_response_tokens=9, seed=1))
    running.advance(3)
    rollout.load_weights(weights(model, 1.2), 4)
    running.restart()
    while len(running):
        running.advance(2)
    assert any(set(s.made.versions) == {3, 4} for s in made)
    assert all(s.made.versions == sorted(s.made.versions) and len(s.made.versions) == len(s.made.tokens) for s in made)


def test_weights_that_are_not_the_models_are_refused_and_nothing_is_served_by_them(stand_in, tmp_path, model) -> None:
    rollout, whole = engine(tmp_path), weights(model)
    with pytest.raises(WorkerFailed, match="before it was given weights"):
        completed(rollout, Sampling(max_response_tokens=9))
    for given, why in (
        ([*whole, ("model.nothing.weight", whole[0][1])], "no weight called 'model.nothing.weight'"),
        ([(whole[0][0], whole[0][1][:-1]), *whole[1:]], "has shape"),
        (whole[:-1], "1 weights did not come, among them"),
    ):
        rollout.load_weights(whole, 3)
        with pytest.raises(WorkerFailed, match=why):
            rollout.load_weights(given, 4)
        assert rollout.version is None

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from whole[:5]
        raise LinkBroken("the source is gone")

    with pytest.raises(LinkBroken):
        rollout.load_weights(broken(), 4)
    with pytest.raises(WorkerFailed, match="before it was given weights"):
        completed(rollout, Sampling(max_response_tokens=9))
    rollout.load_weights(whole, 4)
    assert completed(rollout, Sampling(max_response_tokens=5))


def test_buckets_and_several_workers_get_every_weight(stand_in, tmp_path, model, monkeypatch) -> None:
    from everstep.rl.rollout import vllm

    monkeypatch.setattr(vllm, "BUCKET_BYTES", 4000)
    rollout = engine(tmp_path, tp=2)
    rollout.load_weights(weights(model), 1)
    assert rollout._llm._model.changed > 10
    for mine, theirs in zip(rollout._llm._model.module.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    monkeypatch.setattr(type(rollout._llm._model), "load_weights", lambda self, given: {"lm_head.weight" for _ in given})
    with pytest.raises(WorkerFailed, match="vLLM filled all but"):
        rollout.load_weights(weights(model), 2)


@pytest.mark.parametrize("asleep", [False, True])
def test_adapters_are_merged_into_the_frozen_weights(stand_in, tmp_path, model, asleep) -> None:
    rollout, frozen = engine(tmp_path, adapted=("q_proj",), colocated=True), dict(weights(model))
    rollout.load_weights(frozen.items(), None)
    assert rollout.version is None
    module = "model.layers.0.self_attn.q_proj"
    out, into = frozen[f"{module}.weight"].shape
    a, b = torch.randn(2, into), torch.randn(out, 2)
    for version, factor in ((1, 1.0), (2, 3.0)):  # the second replaces the first
        if asleep:
            rollout.sleep()
        rollout.load_adapter([(f"{module}.lora_A.weight", a * factor), (f"{module}.lora_B.weight", b)], 0.5, version)
        held = dict(rollout._llm._model.module.named_parameters())
        torch.testing.assert_close(held[f"{module}.weight"], frozen[f"{module}.weight"] + 0.5 * factor * (b @ a))
        assert rollout.version == version


def test_an_engine_that_sleeps_serves_nothing_until_it_has_weights_again(stand_in, tmp_path, model) -> None:
    rollout, sampling = engine(tmp_path, colocated=True), Sampling(max_response_tokens=9, seed=1)
    rollout.sleep()
    rollout.load_weights(weights(model), 1)
    before = completed(rollout, sampling)
    rollout.sleep()
    with pytest.raises(WorkerFailed, match="before it was given weights"):
        completed(rollout, sampling)
    with pytest.raises(LinkBroken):
        rollout.load_weights(_broken(weights(model)), 2)
    rollout.sleep()  # half awake
    rollout.sleep()
    rollout.load_weights(weights(model), 3)
    assert completed(rollout, sampling) == before


def _broken(whole: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    yield whole[0]
    raise LinkBroken("the source is gone")


def vllm_run(folder: Path, monkeypatch, *more: str) -> Finished:
    monkeypatch.syspath_prepend(FOLDER)
    done = finish(config(DEMO, folder, *SHORT, *VLLM, *more), clean=True, host=lambda c: ForkedHost(c, prepare=install))
    assert_invariants(done, 5)
    assert gone(done.pids) and next(f for f in check(done.folder) if f.number == 10).held
    return done


def test_a_run_whose_vllm_engines_are_killed(tmp_path, monkeypatch) -> None:
    faults = ["{step: 3, phase: generate, kind: kill, rank: 0}", "{step: 4, phase: sync, kind: kill, rank: 1}"]
    done = vllm_run(tmp_path, monkeypatch, f"faults=[{', '.join(faults)}]", "rollout.engine_args={enforce_eager: true}", "rollout.gpu_memory_fraction=0.3")
    assert len(done.kind("rollout_death")) == len(done.kind("rollout_start")) == 2 and not done.kind("drop")
    assert sum(e["requeued"] for e in done.kind("rollout_death")) > 0


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_engines_on_the_ranks_devices_take_turns_with_training(tmp_path, monkeypatch, engine) -> None:
    """Each engine sleeps before every step, and gets the weights again."""
    fault = "faults=[{step: 4, phase: generate, kind: kill, rank: 0}]"
    done = vllm_run(tmp_path, monkeypatch, "rollout.colocated=true", f"rollout.engine={engine}", "engine.offload.optimizer=true", fault)
    begins = [e.t_wall for e in done.kind("begin")][2:]
    for begin in begins:
        slept = {e.who for e in done.kind("rollout_sleep") if e.t_wall < begin}
        made = {e.who: e.t_wall for e in done.kind("rollout_made") if e.t_wall < begin}
        assert all(any(e.who == who and when < e.t_wall < begin for e in done.kind("rollout_sleep")) for who, when in made.items()), (slept, made)
    assert len(done.kind("rollout_sleep")) >= 2 * len(begins)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["rollout.engines=0"], "rollout.engine=vllm generates in processes of its own"),
        (["recovery.exact=true"], "recovery.exact=true promises weights that depend on no death"),
        (["rollout.temperature=0.7", "rollout.top_k=5"], "no log-probabilities at that temperature before the cut"),
        (["rollout.engine_args={seed: 3}"], "rollout.engine_args.seed is set by everstep, from seed"),
        (["rollout.engine_args={enforce_eagr: true}"], "no such argument; do you mean enforce_eager"),
        (["rollout.engine=transformers", "rollout.tp=2"], "rollout.tp is for rollout.engine=vllm"),
        (["rollout.engine=transformers", "rollout.gpu_memory_fraction=0.5"], "rollout.gpu_memory_fraction is for rollout.engine=vllm"),
        (["rollout.colocated=true", "rollout.max_staleness=1", "rl.importance.level=token"], "leave one of the two out"),
        (["rollout.colocated=true", "rollout.engines=5"], "at most 2 engines"),
        (["rollout.colocated=true", "rollout.tp=2"], "use rollout.tp=1"),
        (["rollout.colocated=true", "rollout.engines=0", "rollout.engine=transformers"], "there are none"),
    ],
)
def test_what_vllm_cannot_do_is_refused(tmp_path, stand_in, more, why) -> None:
    with pytest.raises(ConfigError, match=why):
        check_plan(config(DEMO, tmp_path, *SHORT, *VLLM, *more), {})


def test_without_vllm_the_run_is_refused_before_any_process_starts(tmp_path) -> None:
    """Where vLLM is installed this cannot be seen."""
    pytest.importorskip("torch")
    if "vllm" in sys.modules:
        pytest.skip("vLLM is imported here")
    with pytest.raises(ConfigError, match="vLLM is not installed here; pip install everstep"):
        check_plan(config(DEMO, tmp_path, *SHORT, *VLLM), {})
