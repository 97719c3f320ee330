"""Rollouts by vLLM: what everstep says to it, with a strict stand-in (tests/support/fake_vllm); with the real one on a GPU
(``pytest -m gpu tests/test_rollout_vllm.py -s``); and with the real one on a CPU, in an environment of its own (``make test-vllm``)."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import sys
import time
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
from everstep.errors import ConfigError, LinkBroken, NotEnoughReplicas, WorkerFailed
from everstep.rl.rollout import Sampling
from everstep.rl.rollout.decoding import Pending
from everstep.telemetry.events import read_events
from everstep.telemetry.history import check
from everstep.telemetry.metrics import read_metrics

TINY = Path(DEMO).parent / "models" / "tiny-qwen3"
VLLM = ["rollout.engine=vllm", "rollout.engines=2", "recovery.exact=false", "rollout.tokens_per_call=3", "rollout.call_timeout_s=20"]
SHORT = ["faults=[]", "warmup.steps=2", "rl.iterations=3", "rl.eval_every=0", "train.micro_batch_size=32", "warmup.samples_per_step=128",
         "rl.prompts_per_step=8", "rl.samples_per_prompt=8", "rollout.samples_per_batch=16", "layout.replicas=2", "layout.spares=0", "recovery.heartbeat_s=0.2", "checkpoint.at_end=false"]


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


def expected(model: torch.nn.Module, sequence: Pending, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities that transformers' model gives the tokens that were made."""
    ids = torch.tensor([sequence.prompt + sequence.made.tokens], device=next(model.parameters()).device)
    logits = model(input_ids=ids).logits[0, len(sequence.prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, ids[0, len(sequence.prompt) :, None])[:, 0].cpu()


def worst(model: torch.nn.Module, made: list[Pending]) -> float:
    """The greatest difference between what was said of a token, and what the model says."""
    return max(float((expected(model, s) - torch.tensor(s.made.logprobs)).abs().max()) for s in made)


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


def test_without_cuda_graphs_vllm_is_eager_unless_its_own_argument_says_otherwise(tmp_path, stand_in) -> None:
    eager = lambda **how: engine(tmp_path, **how)._llm.args.enforce_eager
    assert [eager(), eager(cuda_graphs=False), eager(cuda_graphs=False, engine_args={"enforce_eager": False})] == [False, True, False]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_come_with_the_models_log_probabilities_at_the_sampling_temperature(stand_in, tmp_path, model, temperature) -> None:
    rollout, made = engine(tmp_path, temperature=temperature), sequences(40)
    rollout.load_weights(weights(model), 3)
    completed(rollout, Sampling(temperature, max_response_tokens=9, seed=1), made)
    assert len({len(s.made.tokens) for s in made}) > 1, "some end by themselves"
    for sequence in made:
        said = sequence.made
        torch.testing.assert_close(torch.tensor(said.logprobs), expected(model, sequence, temperature), atol=1e-4, rtol=0)
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
    assert rollout._llm._model.buckets > 10
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
        assert all(torch.equal(held[name], frozen[name]) for name in held if name != f"{module}.weight"), "also what is one matrix with it in vLLM"
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
    assert len(done.kind("rollout_death")) == 2 and not done.kind("drop")
    assert 2 >= len(done.kind("rollout_start")) >= 1, "the second one's successor may come when the run is over"
    assert sum(e["requeued"] for e in done.kind("rollout_death")) > 0


def _refuses() -> None:
    install()
    import vllm

    def fail(self, weights):
        raise RuntimeError("no memory for these weights")

    vllm._Model.load_weights = fail


@pytest.mark.full
def test_an_engine_that_never_takes_weights_is_replaced_and_in_the_end_the_run_ends(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    chosen = config(DEMO, tmp_path, *SHORT, *VLLM, "rollout.engines=1", "rollout.engine_restarts=1")
    with pytest.raises(NotEnoughReplicas, match="no memory for these weights"):
        finish(chosen, clean=True, host=lambda c: ForkedHost(c, prepare=_refuses))
    tries = [event.who for event in read_events(tmp_path / "events") if event.event == "rollout_sync_begin"]
    assert len(tries) == 10 and len(set(tries)) == 2, "five of each engine"
    assert gone([event.pid for event in read_events(tmp_path / "events") if event.event == "process_start"])


@pytest.mark.parametrize("engine", ["vllm", pytest.param("transformers", marks=pytest.mark.full)])
def test_engines_on_the_ranks_devices_take_turns_with_training(tmp_path, monkeypatch, engine) -> None:
    """Each engine sleeps before every step, and gets the weights again."""
    fault = "faults=[{step: 4, phase: generate, kind: kill, rank: 0}]"
    done = vllm_run(tmp_path, monkeypatch, "rollout.colocated=true", f"rollout.engine={engine}", "engine.offload.optimizer=true", fault)
    begins = [e.t_wall for e in done.kind("begin")][2:]
    for begin in begins:
        slept = {e.who for e in done.kind("rollout_sleep") if e.t_wall < begin}
        made = {e.who: e.t_wall for e in done.kind("rollout_made") if e.t_wall < begin}
        assert all(any(e.who == who and when < e.t_wall < begin for e in done.kind("rollout_sleep")) for who, when in made.items()), (slept, made)
    assert len(done.kind("rollout_sleep")) >= 2 * len(begins) - 1  # the one that is started in the dead one's place may come later


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
        (["rollout.on_spares=true"], "lets idle spares help rollout.engines"),
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


# -- the real one ------------------------------------------------------------------------------------------------------------

HAS_VLLM = importlib.util.find_spec("vllm") is not None
CUDA = torch.cuda.is_available()


def marked(*marks):
    """A decorator for all of them."""
    return lambda test: functools.reduce(lambda marking, mark: mark(marking), marks, test)


real = marked(pytest.mark.gpu, pytest.mark.full, pytest.mark.timeout(540), pytest.mark.skipif(not CUDA or not HAS_VLLM, reason="needs a CUDA device and vLLM"))
#: ``make test-vllm``: vLLM's build for CPUs wants other versions of its needs than ours, so it has an environment of its own.
real_on_cpu = marked(pytest.mark.full, pytest.mark.timeout(540), pytest.mark.skipif(CUDA or not HAS_VLLM, reason="needs vLLM's build for CPUs"))


@pytest.fixture
def shaped(tmp_path) -> Path:
    """A model's folder: the tokenizer of the tiny one, and a shape that GPU kernels are made for."""
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    shape = AutoConfig.from_pretrained(TINY)
    shape.update({"hidden_size": 256, "head_dim": 64, "num_hidden_layers": 4, "intermediate_size": 512, "layer_types": ["full_attention"] * 4,
                  "max_window_layers": 4, "dtype": "bfloat16"})
    shape.save_pretrained(folder)
    return folder


@real
def test_the_real_vllm_says_what_transformers_says(shaped, tmp_path) -> None:
    """Log-probabilities, seeds, versions, refused weights, sleep: with real memory."""
    from everstep.rl.rollout.vllm import VllmRollout

    torch.manual_seed(0)
    shape, tokenizer = AutoConfig.from_pretrained(shaped), AutoTokenizer.from_pretrained(shaped)
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).cuda().requires_grad_(False)
    for p in model.parameters():
        if p.dim() == 2:
            p.mul_(2)
    start = time.monotonic()
    rollout = VllmRollout(RolloutConfig(engine="vllm", engines=1, colocated=True, gpu_memory_fraction=0.3, samples_per_batch=64), shape, tokenizer,
                          torch.bfloat16, 256, (), 0, tmp_path / "vllm")
    started = time.monotonic() - start
    whole = [(name, p.cpu()) for name, p in model.named_parameters()]
    start = time.monotonic()
    rollout.load_weights(whole, 1)
    loaded, sampling = time.monotonic() - start, Sampling(max_response_tokens=100, seed=1)
    made = sequences(64)
    completed(rollout, sampling, made, 32)
    start = time.monotonic()
    again = completed(rollout, sampling, tokens=32)
    seconds = time.monotonic() - start
    difference, tokens = worst(model, made), 0
    for sequence in made:
        said = sequence.made
        tokens += len(said.tokens)
        assert said.versions == [1] * len(said.tokens) and said.finished == (said.tokens[-1] in rollout._eos)
    same = sum(again[s.sample_id] == s.made.tokens for s in made[: len(again)])
    free = torch.cuda.mem_get_info()[0]
    rollout.sleep()
    freed = torch.cuda.mem_get_info()[0] - free
    start = time.monotonic()
    rollout.load_weights([(name, p * 1.1) for name, p in whole], 2)
    woken = time.monotonic() - start
    other = completed(rollout, sampling, tokens=32)
    rollout.load_weights(whole, 3)
    back = completed(rollout, sampling, tokens=32)
    with pytest.raises(WorkerFailed, match="did not come"):
        rollout.load_weights(whole[:-1], 4)
    assert rollout.version is None
    print(f"\nvLLM: start {started:.1f} s, load {loaded:.3f} s, {tokens} tokens, worst log-prob difference {difference:.4f}, "
          f"{same}/{len(again)} samples the same when made again, {sum(map(len, again.values())) / seconds:.0f} tokens/s, "
          f"sleep freed {freed / 2**30:.1f} GiB, woken and loaded in {woken:.2f} s; other weights: {sum(other[s] != again[s] for s in again)} differ, "
          f"weights back: {sum(back[s] == again[s] for s in again)}/{len(again)} the same")
    assert difference < 0.1 and same >= len(again) * 0.8
    assert freed > 5 * 2**30
    assert other != again and sum(back[s] == again[s] for s in again) >= len(again) * 0.8


@real
@pytest.mark.parametrize("lora", [0, 4])
def test_a_run_with_the_real_vllm_on_the_ranks_device_and_a_kill(shaped, tmp_path, lora) -> None:
    """One GPU: a rank and an engine that take turns; the engine is killed while it generates."""
    more = [f"model.path={shaped}", "model.init=random", "model.dtype=bfloat16", "device=cuda", "layout.replicas=1", "recovery.min_replicas=1",
            "rollout.engines=1", "rollout.colocated=true", "rollout.gpu_memory_fraction=0.3", "rollout.call_timeout_s=60", "ray.start_timeout_s=240",
            "engine.offload.optimizer=true", "engine.offload.gradients=true", "recovery.silence_s=30", f"lora.rank={lora}",
            "rollout.engine_args={enforce_eager: true}"]  # it starts twice; compiling takes most of that time
    done = finish(config(DEMO, tmp_path / "run", *SHORT, *VLLM, *more, "faults=[{step: 4, phase: generate, kind: kill, rank: 0}]"), clean=True)
    assert_invariants(done, 5)
    assert gone(done.pids) and next(f for f in check(done.folder) if f.number == 10).held
    assert len(done.kind("rollout_death")) == len(done.kind("rollout_start")) == 1 and not done.kind("drop")
    assert {e["way"] for e in done.kind("rollout_sync")} == {"device"}
    correction = [row["rollout_corr/kl"] for row in read_metrics(done.folder / "metrics.jsonl") if "rollout_corr/kl" in row]
    print("\n", [(e["kind"], round(e["seconds"], 3)) for e in done.kind("rollout_sync")], correction)


@pytest.fixture
def cpu_vllm(monkeypatch) -> None:
    """Engines of a test keep their keys and values in little memory, and compute on one thread."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")


@real_on_cpu
@pytest.mark.parametrize("tp", [1, 2])
def test_the_real_vllm_on_a_cpu_says_what_transformers_says(shaped, tmp_path, cpu_vllm, tp) -> None:
    """Log-probabilities, seeds, versions, adapters, refused weights; alone, and split over two processes."""
    from everstep.rl.rollout.vllm import VllmRollout

    torch.manual_seed(0)
    shape, tokenizer = AutoConfig.from_pretrained(shaped), AutoTokenizer.from_pretrained(shaped)
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32).requires_grad_(False)
    for p in model.parameters():
        if p.dim() == 2:
            p.mul_(2)
    rollout = VllmRollout(RolloutConfig(engine="vllm", engines=1, tp=tp, samples_per_batch=16, engine_args={"enforce_eager": True}), shape, tokenizer, torch.float32, 256, ("q_proj", "down_proj"), 0,
                          tmp_path / "vllm")
    rollout.load_weights(list(model.named_parameters()), 1)
    sampling, made = Sampling(max_response_tokens=40, seed=1), sequences(16)
    first = completed(rollout, sampling, made, 8)
    assert worst(model, made) < 1e-3 and all(s.made.versions == [1] * len(s.made.tokens) for s in made)
    again = completed(rollout, sampling, sequences(16), 3)
    assert sum(again[s] == first[s] for s in first) >= 13, "the same seeds make the same samples"
    adapter, scale = _adapter(model), 0.5
    rollout.load_adapter(adapter, scale, 2)
    other = sequences(16)
    completed(rollout, sampling, other, 8)
    assert worst(model, other) > 1e-2, "it has other weights now"
    _merge(model, adapter, scale)
    assert worst(model, other) < 1e-3 and {v for s in other for v in s.made.versions} == {2}
    with pytest.raises(WorkerFailed, match="did not come"):
        rollout.load_weights(list(model.named_parameters())[:-1], 3)
    assert rollout.version is None


def _adapter(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """LoRA matrices of rank 4."""
    pairs = []
    for name, p in model.named_parameters():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in ("q_proj", "down_proj"):
            a, b = torch.randn(4, p.shape[1]) * 0.1, torch.randn(p.shape[0], 4) * 0.1
            pairs += [(f"{module}.lora_A.weight", a), (f"{module}.lora_B.weight", b)]
    return pairs


def _merge(model: torch.nn.Module, adapter: list[tuple[str, torch.Tensor]], scale: float) -> None:
    known, given = dict(model.named_parameters()), dict(adapter)
    for name in (name for name in given if name.endswith("lora_A.weight")):
        module = name.removesuffix(".lora_A.weight")
        known[f"{module}.weight"] += scale * given[name.replace("lora_A", "lora_B")] @ given[name]


@real_on_cpu
@pytest.mark.parametrize("lora", [0, 4])
def test_a_run_whose_real_vllm_engines_are_killed(shaped, tmp_path, lora, cpu_vllm) -> None:
    """Two engines, processes of their own: one is killed while it generates, the other while it gets weights; both are started again."""
    more = [f"model.path={shaped}", "model.init=random", "rollout.engines=2", "rollout.call_timeout_s=60", f"lora.rank={lora}",
            "recovery.silence_s=30", "rollout.engine_args={enforce_eager: true}", "rl.importance.level=token"]
    faults = ["{step: 3, phase: generate, kind: kill, rank: 0}", "{step: 4, phase: sync, kind: kill, rank: 1}"]
    done = finish(config(DEMO, tmp_path / "run", *SHORT, *VLLM, *more, f"faults=[{', '.join(faults)}]"), clean=True)
    assert_invariants(done, 5)
    assert gone(done.pids) and next(f for f in check(done.folder) if f.number == 10).held
    assert len(done.kind("rollout_death")) == 2 and done.kind("rollout_start") and not done.kind("drop")
    assert sum(e["requeued"] for e in done.kind("rollout_death")) > 0
    differs = [row["rollout_corr/kl"] for row in read_metrics(done.folder / "metrics.jsonl") if "rollout_corr/kl" in row]
    assert differs and all(abs(value) < 1e-3 for value in differs), "the ranks say of its tokens what it said"
