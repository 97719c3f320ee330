"""DiLoCo's arithmetic against recorded traces, over real links: `tests/golden/diloco/supplement.json` (made with torchft 0.2.0; the
README of tests/golden says how), and, where they are at hand, torchft's own (in ../shared/golden/diloco, or in the folder that EVERSTEP_TORCHFT_TRACES names)."""

from __future__ import annotations

import copy
import itertools
import json
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.runs import SFT, config

from everstep.config import semisync
from everstep.config.check import check_plan
from everstep.config.schema import SemiSyncConfig
from everstep.engine.shape import ModelShape
from everstep.errors import ConfigError
from everstep.recovery import link as links
from everstep.recovery.link import Link
from everstep.recovery.quantized import BLOCK, decode, encode, sum_quantized
from everstep.recovery.semisync import Outer, OuterSgd

GOLDEN = json.loads((Path(__file__).parent / "golden" / "diloco" / "supplement.json").read_text())
TRACES = Path(os.environ.get("EVERSTEP_TORCHFT_TRACES") or Path(__file__).parents[2] / "shared" / "golden" / "diloco")
never = lambda: False
numbers = itertools.count()


# -- real links between replicas of one process ----------------------------------------------------------------------------------


class Lines:
    """Links among replicas, made anew whenever they are others; one thread for each replica in a collective."""

    def __init__(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._links: dict[tuple[int, ...], list[Link]] = {}

    def together(self, replicas: Sequence[int], act: Callable[[Link, int], Any]) -> list[Any]:
        """What ``act(link, index)`` gives on each."""
        members = tuple(replicas)
        if members not in self._links:
            name = f"{next(numbers)}"
            self._links[members] = [None] * len(members)  # type: ignore[list-item]
            self._each(len(members), lambda i: self._links[members].__setitem__(i, self._link(name, members, i)))
        results: list[Any] = [None] * len(members)
        self._each(len(members), lambda i: results.__setitem__(i, act(self._links[members][i], i)))
        return results

    def _link(self, name: str, members: tuple[int, ...], index: int) -> Link:
        store = dist.TCPStore("127.0.0.1", self._store.port, is_master=False, timeout=timedelta(seconds=20))
        return Link(name, members, members[index], 0, store, torch.device("cpu"), 20.0)

    @staticmethod
    def _each(count: int, act: Callable[[int], None]) -> None:
        errors: list[BaseException] = []

        def run(i: int) -> None:
            try:
                act(i)
            except BaseException as error:  # raised again below, on the thread of the test
                errors.append(error)

        threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
        assert not any(thread.is_alive() for thread in threads)
        if errors:
            raise errors[0]


@pytest.fixture(scope="module")
def lines() -> Lines:
    return Lines()


# -- traces ----------------------------------------------------------------------------------------------------------------------


class Replica:
    """A replica with the inner optimizer, the weights and the gradients of a trace."""

    def __init__(self, initial: list[dict[str, Any]], inner: dict[str, Any], outer: OuterSgd):
        self.weights = {f"{f}.{name}": torch.tensor(value) for f, fragment in enumerate(initial) for name, value in fragment.items()}
        fragments = [[f"{f}.{name}" for name in fragment] for f, fragment in enumerate(initial)]
        self.inner = self._optimizer(inner)
        self.outer = Outer(outer, fragments, self.weights)
        self.steps = 0
        self.history = [self._nested(self.weights)]
        self.synced_at: list[tuple[int, dict[str, Any]]] = [(0, self._nested(self.outer.globals))]

    def _optimizer(self, inner: dict[str, Any]) -> torch.optim.Optimizer:
        if inner["type"] == "sgd":
            return torch.optim.SGD(self.weights.values(), lr=inner["lr"])
        return torch.optim.AdamW(
            self.weights.values(), lr=inner["lr"], betas=tuple(inner["betas"]), eps=inner["eps"], weight_decay=inner["weight_decay"]
        )

    def step(self, gradient: list[dict[str, Any]]) -> None:
        for f, fragment in enumerate(gradient):
            for name, value in fragment.items():
                self.weights[f"{f}.{name}"].grad = torch.tensor(value)
        self.inner.step()
        self.steps += 1

    def heal(self, source: Replica) -> None:
        """Everything that ``Island.tensors`` and ``scalars`` hold."""
        for name in self.weights:
            self.weights[name].copy_(source.weights[name])
            self.outer.globals[name].copy_(source.outer.globals[name])
            if self.outer.momenta:
                self.outer.momenta[name].copy_(source.outer.momenta[name])
        self.outer.synced = source.outer.synced
        self.inner.load_state_dict(copy.deepcopy(source.inner.state_dict()))

    def record(self) -> None:
        self.history.append(self._nested(self.weights))

    def record_sync(self) -> None:
        self.synced_at.append((self.steps, self._nested(self.outer.globals)))

    def _nested(self, tensors: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
        nested: list[dict[str, Any]] = []
        for name, tensor in tensors.items():
            f, inside = name.split(".", 1)
            if int(f) == len(nested):
                nested.append({})
            nested[int(f)][inside] = tensor.tolist()
        return nested


def play(case: dict[str, Any], lines: Lines) -> dict[tuple[int, int], Replica]:
    """(replica, incarnation) -> it, after the whole scenario. A replacement enters as the traces have it: before the sum, with what its
    source holds at that moment; it then makes no pseudo-gradient of its own, where theirs counts the source's twice, which is the same mean
    for two replicas."""
    outer = OuterSgd(case["outer_optimizer"]["lr"], case["outer_optimizer"].get("momentum", 0.0),
                     case["outer_optimizer"].get("nesterov", False), case["update_alpha"])
    make = lambda: Replica(case["initial_parameters"], case["inner_optimizer"], outer)
    living = {r: (0, make()) for r in range(case["num_replicas"])}
    everyone = {(r, 0): replica for r, (_, replica) in living.items()}
    fails = {e["inner_step"] for e in case["events"] if e["type"] == "fail_allreduce"}
    window, delay = case["fragment_sync_every"], case["sync_delay"]
    syncs = 0
    joiners: set[int] = set()
    while syncs < case["committed_syncs"]:
        taken: dict[int, list[torch.Tensor]] = {}
        for i in range(1, window + 1):
            for r, (life, replica) in living.items():
                replica.step(case["gradients"][r][life][replica.steps])
                if i < window:
                    replica.record()
            if i == window - delay:
                for r in joiners:
                    source = next(replica for s, (_, replica) in living.items() if s not in joiners)
                    living[r][1].heal(source)
                taken = {r: replica.outer.pseudo_gradient(replica.weights) for r, (_, replica) in living.items()}
        members = sorted(living)
        failed = any(replica.steps - window < s <= replica.steps for _, replica in living.values() for s in fails)
        gives = [taken[r] if r not in joiners else [torch.zeros_like(t) for t in taken[r]] for r in members]
        summed = lines.together(members, lambda link, i, gives=gives: link.sum(gives[i], never, 20.0))
        for r, total in zip(members, summed, strict=True):
            replica = living[r][1]
            if failed:  # torchft's rule for one fragment; a skipped round of ours takes the whole replica back
                for name in replica.outer.fragment:
                    replica.weights[name].copy_(replica.outer.globals[name])
            else:
                replica.outer.step([t / (len(members) - len(joiners)) for t in total], replica.weights)
                replica.record_sync()
            replica.record()
        syncs += not failed
        joiners = set()
        for event in case["events"]:
            if event["type"] != "exit" or event["replica"] not in living:
                continue
            life, replica = living[event["replica"]]
            if life == event["incarnation"] and replica.steps == event["after_inner_step"]:
                del living[event["replica"]]
                if event["restart"]:
                    born = living[event["replica"]] = (life + 1, make())
                    living = dict(sorted(living.items()))
                    everyone[event["replica"], life + 1] = born[1]
                    joiners.add(event["replica"])
    return everyone


def assert_close(got: Any, wanted: Any, where: str) -> None:
    flat = lambda nested: torch.cat([torch.tensor(v, dtype=torch.float64).reshape(-1) for fragment in nested for v in fragment.values()])
    torch.testing.assert_close(flat(got), flat(wanted), rtol=1e-5, atol=2e-5, msg=lambda m: f"{where}: {m}")


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_the_recorded_traces_are_reproduced(case, lines):
    everyone = play(case, lines)
    assert set(everyone) == {(r, i) for r, lives in enumerate(case["expected"]) for i in range(len(lives))}
    for (r, life), replica in everyone.items():
        expected = case["expected"][r][life]
        assert len(replica.history) == len(expected["history"])
        for step, (got, wanted) in enumerate(zip(replica.history, expected["history"], strict=True)):
            assert_close(got, wanted, f"replica {r} life {life}, local weights after inner step {step}")
        globals_at = {entry["after_inner_steps"]: entry for entry in expected["global_history"]}
        compared = [(step, got) for step, got in replica.synced_at if step in globals_at and (step or not life)]
        assert {step for step, _ in compared} >= {step for step in globals_at if step > min(dict(replica.synced_at))}
        for step, got in compared:
            assert_close(got, globals_at[step]["global_parameters"], f"replica {r} life {life}, global weights after {step}")
        last = expected["global_history"][-1]
        momenta = last["outer_momentum"]
        if all(value is not None for fragment in momenta for value in fragment.values()):
            assert_close(replica._nested(replica.outer.momenta), momenta, f"replica {r} life {life}, outer momentum at the end")
    used = [e for c in GOLDEN["cases"] for e in c["events"]]
    assert {e["type"] for e in used} == {"exit", "fail_allreduce"}


@pytest.mark.skipif(not TRACES.is_dir(), reason="neither ../shared/golden/diloco nor EVERSTEP_TORCHFT_TRACES has torchft's own traces")
@pytest.mark.parametrize(("name", "delay", "alpha", "fails"), [
    ("updates_0", 0, 0.0, False), ("updates_1", 0, 0.5, False), ("updates_3", 1, 0.0, False), ("updates_5", 1, 1.0, False),
    ("failure_recovery_0", 0, 0.0, True),
])  # fmt: skip
def test_torchfts_own_traces_are_reproduced(name, delay, alpha, fails, lines):
    """Two 1x1 layers, gradient 2, inner SGD of lr 1, outer SGD of lr 2 without momentum, a sync every third step, fragments in turn."""
    (path,) = TRACES.glob(f"*test_diloco_mocked_{name}.json")
    trace = [replica[0] for replica in json.loads(path.read_text())]
    layers = ["layers.0.weight", "layers.1.weight"]
    steps = max(int(s) for s in trace[0]["history"])
    gradient = [[{layer: [[2.0]]} for layer in layers]] * steps
    case = {
        "num_replicas": 2, "initial_parameters": [{layer: [[1.0]]} for layer in layers], "inner_optimizer": {"type": "sgd", "lr": 1.0},
        "outer_optimizer": {"lr": 2.0}, "fragment_sync_every": 3, "sync_delay": delay, "update_alpha": alpha, "committed_syncs": steps // 3,
        "gradients": [[gradient], [gradient, gradient]],
        "events": [{"type": "exit", "replica": 1, "incarnation": 0, "after_inner_step": 6, "restart": True}] if fails else [],
    }  # fmt: skip
    everyone = play(case, lines)
    for r in range(2):
        replica = everyone[r, int(fails and r == 1)]
        history = [{layer: weights[layer] for layer in layers} for weights in trace[r]["history"].values()]
        assert len(replica.history) == len(history)
        for step, (got, wanted) in enumerate(zip(replica.history, history, strict=True)):
            flat = {layer: value for fragment in got for layer, value in fragment.items()}
            assert flat == wanted, (r, step)  # small whole numbers and halves: exact


# -- the outer optimizer ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, True), (0.9, False), (0.0, False)])
def test_the_outer_optimizer_is_torchs_sgd(momentum, nesterov):
    made = torch.Generator().manual_seed(3)
    weights = {"a": torch.randn(7, 3, generator=made), "b": torch.randn(5, generator=made)}
    outer = Outer(OuterSgd(0.7, momentum, nesterov, alpha=0.0), [["a", "b"]], weights)
    ours = {name: t.clone() for name, t in weights.items()}
    theirs = {name: t.clone().requires_grad_() for name, t in weights.items()}
    sgd = torch.optim.SGD(theirs.values(), lr=0.7, momentum=momentum, nesterov=nesterov)
    for _ in range(5):
        mean = [torch.randn(t.shape, generator=made) for t in weights.values()]
        for tensor, gradient in zip(theirs.values(), mean, strict=True):
            tensor.grad = gradient.clone()
        sgd.step()
        outer.step(mean, ours)
        for name in weights:
            assert torch.equal(ours[name], theirs[name]) and torch.equal(outer.globals[name], theirs[name])


def test_local_sgd_takes_the_mean_of_the_weights(lines):
    made = torch.Generator().manual_seed(4)
    start = {"a": torch.randn(40, generator=made)}
    local = [{"a": start["a"] + torch.randn(40, generator=made)} for _ in range(3)]
    sgd = OuterSgd.of(SemiSyncConfig(method="local_sgd"))
    outers = [Outer(sgd, [["a"]], start) for _ in range(3)]
    moved = [outer.pseudo_gradient(weights) for outer, weights in zip(outers, local, strict=True)]
    mean = torch.stack([weights["a"] for weights in local]).mean(0)
    for i, total in enumerate(lines.together(range(3), lambda link, i: link.sum(moved[i], never, 20.0))):
        outers[i].step([t / 3 for t in total], local[i])
    for weights in local:
        torch.testing.assert_close(weights["a"], mean, rtol=1e-6, atol=1e-6)
        assert torch.equal(weights["a"], local[0]["a"])


def test_a_weight_in_no_fragment_or_in_two_is_refused():
    weights = {"a": torch.zeros(1), "b": torch.zeros(1)}
    for fragments in ([["a"]], [["a"], ["a", "b"]]):
        with pytest.raises(ValueError, match="exactly one fragment"):
            Outer(OuterSgd(1.0, 0.0, False, 0.0), fragments, weights)


# -- sums ------------------------------------------------------------------------------------------------------------------------


SHAPES = [(3, 5), (), (70,), (0,), (256,), (11, 13), (1,)]


def tensors(seed: int, scale: float = 1.0) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=made) * scale * 10.0**i for i, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("bucket_bytes", [4, 40, 100, 64 << 20])
def test_tensors_that_straddle_a_bucket_are_summed_whole(bucket_bytes, lines, monkeypatch):
    """Packed into buckets of every size, larger and smaller than a tensor: each number is the sum of all replicas'."""
    monkeypatch.setattr(links, "BUCKET_BYTES", bucket_bytes)
    gives = [tensors(seed) for seed in range(2)]
    for total in lines.together(range(2), lambda link, i: link.sum(gives[i], never, 20.0)):
        for got, *parts in zip(total, *gives, strict=True):
            assert torch.equal(got, parts[0] + parts[1])


def block_bound(given: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """The bound of everstep.recovery.quantized, number by number."""
    flat = torch.stack([torch.cat([t.reshape(-1) for t in ts]) for ts in given])
    padded = torch.nn.functional.pad(flat, (0, -flat.shape[1] % (len(given) * BLOCK)))
    largest = padded.unflatten(1, (-1, BLOCK)).abs().amax(2)  # replica, block
    first = largest.sum(0) / 254
    of_sum = padded.sum(0).unflatten(0, (-1, BLOCK)).abs().amax(1) + first
    return (first + of_sum / 254).repeat_interleave(BLOCK)[: flat.shape[1]]


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("window", [None, 3 * 2 * BLOCK * 4])
def test_quantized_sums_keep_their_bound_and_are_the_same_everywhere(replicas, window, lines, monkeypatch):
    if window:
        monkeypatch.setattr("everstep.recovery.quantized.BUCKET_BYTES", window)
    gives = [[*tensors(seed, 10.0**seed), torch.randn(5000, generator=torch.Generator().manual_seed(seed))] for seed in range(replicas)]
    totals = lines.together(range(replicas), lambda link, i: sum_quantized(link, gives[i], never, 20.0))
    exact = torch.stack([torch.cat([t.reshape(-1) for t in ts]).double() for ts in gives]).sum(0)
    got = torch.cat([t.reshape(-1) for t in totals[0]])
    bound = block_bound(gives)
    error = (got.double() - exact).abs()
    assert (error <= bound * (1 + 1e-5) + 1e-30).all()
    assert (error > bound / 20).any()  # it was rounded
    for total in totals:
        assert all(torch.equal(a, b) and a.shape == b.shape for a, b in zip(total, totals[0], strict=True))


def test_quantized_sums_send_a_quarter_of_the_bytes(lines):
    gives = [torch.randn(BLOCK * 64)]

    def sent(link: Link, act: Callable[[Link], Any]) -> int:
        before = link.sent_bytes
        act(link)
        return link.sent_bytes - before

    whole = lines.together(range(2), lambda link, i: sent(link, lambda link: link.sum(gives, never, 20.0)))
    small = lines.together(range(2), lambda link, i: sent(link, lambda link: sum_quantized(link, gives, never, 20.0)))
    assert whole == [BLOCK * 64 * 4] * 2  # a ring all-reduce of n bytes sends 2 n (members - 1) / members
    assert small == [BLOCK * 64 + 64 * 4] * 2


def test_one_replica_alone_is_not_rounded(lines):
    gives = tensors(1)
    ((total),) = lines.together([5], lambda link, i: sum_quantized(link, gives, never, 20.0))
    assert all(torch.equal(a, b) and a is not b for a, b in zip(total, gives, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_stay_so(bad, lines):
    gives = [torch.ones(BLOCK * 3), torch.ones(BLOCK * 3)]
    gives[1][BLOCK] = bad
    for (total,) in lines.together(range(2), lambda link, i: sum_quantized(link, [gives[i]], never, 20.0)):
        assert not torch.isfinite(total[BLOCK : 2 * BLOCK]).any() and torch.equal(total[:BLOCK], torch.full((BLOCK,), 2.0))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=BLOCK, max_size=BLOCK))
def test_one_block_is_rounded_by_at_most_half_a_step(numbers):
    x = torch.tensor(numbers)
    step = x.abs().max() / 127
    assert ((decode(encode(x)) - x).abs() <= step / 2 * (1 + 1e-5) + 1e-37).all()


# -- configuration ----------------------------------------------------------------------------------------------------------------


def refused(tmp_path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        check_plan(config(SFT, tmp_path / "run", *overrides))
    return str(error.value)


STREAM = "semisync.method=streaming_diloco"


@pytest.mark.parametrize(("overrides", "says"), [
    (["semisync.sync_every=5"], "semisync.method=none does not use it"),
    (["semisync.method=local_sgd", "semisync.outer_lr=0.5"], "semisync.outer_lr is given, but semisync.method=local_sgd"),
    (["semisync.method=diloco", "semisync.fragments=2"], "semisync.fragments is given, but semisync.method=diloco"),
    (["semisync.method=diloco", "semisync.sync_every=7"], "sft.steps=60 are not whole rounds"),
    ([STREAM, "semisync.sync_every=5", "semisync.fragments=2"], "must be a multiple of the 2 fragments"),
    ([STREAM, "semisync.sync_every=6", "semisync.fragments=3"], "more than the 2 layers"),
    ([STREAM, "semisync.fragments=0"], "at least one fragment"),
    ([STREAM, "semisync.sync_every=4", "semisync.fragments=2", "semisync.fragment_sync_delay=2"], "must be less than the 2 inner steps"),
    ([STREAM, "semisync.fragments=[[model.layers.*],[model.embed_tokens]]"], "model.norm is in no fragment"),
    ([STREAM, "semisync.fragments=[[model.*],[model.norm]]"], "model.norm is matched more than once"),
    ([STREAM, "semisync.fragments=[[model.*],[model.layer.0]]"], "'model.layer.0' matches no trained module"),
    ([STREAM, "semisync.fragments=[[model.*],[]]"], "semisync.fragments.1 is empty"),
    (["semisync.method=diloco", "recovery.exact=true"], "recovery.exact=true promises"),
    (["semisync.method=diloco", "recovery.mode=wait", "layout.spares=1"], "recovery.mode=wait promises"),
    (["semisync.method=diloco", "semisync.outer_momentum=0"], "outer_nesterov=true needs momentum"),
    (["semisync.method=diloco", "faults=[{step: 7}]"], "step=7 never comes; the run has 6 steps"),
])  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_starts(overrides, says, tmp_path):
    assert says in refused(tmp_path, *overrides)


@pytest.mark.parametrize("layers", [1, 2, 5, 24])
@pytest.mark.parametrize("tied", [True, False])
def test_a_count_cuts_the_layers_evenly(layers, tied, tmp_path):
    shape = ModelShape("Qwen3ForCausalLM", layers, hidden=8, ffn=16, heads=2, kv_heads=1, head_dim=4, vocab=32, tied=tied)
    for count in range(1, min(layers, 7) + 1):
        conf = config(SFT, tmp_path / "run", STREAM, f"semisync.fragments={count}", f"semisync.sync_every={count}")
        cut = semisync.fragments(conf, shape)
        modules = semisync.trained_modules(conf, shape)
        assert list(itertools.chain(*cut)) == list(modules)
        sizes = [sum(m.startswith("model.layers.") for m in group) for group in cut]
        assert len(cut) == count and max(sizes) - min(sizes) <= 1 and min(sizes) >= 1
        assert ("lm_head" in modules) is not tied


