"""The engine's promises to the step transaction: state that can be copied, nothing that leaks, groups that close."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

import pytest
import torch

from everstep.errors import EverstepError, ReplicaBroken
from everstep.layout import Layout
from support.models import NllWithEntropy, batch, hf_model, settings, tiny_config
from support.processes import join_world, run_ranks

CPU = torch.device("cpu")
LR, SCALE = 1e-2, 0.05


def engine_of(layout: Layout, rank: int, *, seed: int | None = 3, hf: Any = None, **sections: Any) -> Any:
    """An engine with random weights of ``seed`` (None: undefined weights)."""
    from everstep.engine.step import Engine

    hf = hf or tiny_config("qwen3", tied=True)
    engine = Engine(settings(**sections), hf, layout.position(rank), layout, CPU)
    if seed is not None:
        engine.init_random(seed)
    return engine


def data(layout: Layout, rank: int, step: int = 0) -> list[Any]:
    every = [batch(10 * step + 1, 2, 9), batch(10 * step + 2, 1, 12), batch(10 * step + 3, 2, 7), batch(10 * step + 4, 1, 5)]
    return every[layout.position(rank).dp :: layout.dp]


def one_step(engine: Any, batches: list[Any], lr: float = LR, seeds: list[int] | None = None) -> tuple[float, float]:
    """(loss sum, squared norm) of one full step."""
    sums = engine.accumulate(batches, NllWithEntropy(), seeds or [0] * len(batches))
    norm2 = engine.squared_norm(engine.gradients())
    engine.apply(engine.gradients(), SCALE, lr)
    return float(sums[1]), norm2


# ------------------------------------------------------------------ the layout does not change the result


def two_steps(rank: int, layout: Layout, sharded: bool, recompute: str) -> tuple[Any, list[Any], dict[str, Any]]:
    engine = engine_of(layout, rank, engine={"distributed_optimizer": sharded, "recompute": recompute})
    initial = dict(engine.export_hf())
    numbers = [one_step(engine, data(layout, rank, step)) for step in range(2)]
    return initial, numbers, dict(engine.export_hf())


def test_layouts_agree_with_a_single_rank() -> None:
    initial, numbers, final = run_ranks(two_steps, 1, Layout(), True, "none")[0]
    for layout, sharded, recompute in (
        (Layout(), False, "full"),
        (Layout(tp=2), True, "full"),
        (Layout(pp=2), False, "none"),
        (Layout(dp=2), True, "none"),
        (Layout(dp=2), False, "full"),
    ):
        case = f"{layout} sharded={sharded} recompute={recompute}"
        for start, others, end in run_ranks(two_steps, layout.ranks_per_replica, layout, sharded, recompute):
            assert all(torch.equal(start[k], initial[k]) for k in initial), f"init_random differs: {case}"
            for (loss, norm2), (loss1, norm21) in zip(others, numbers, strict=True):
                assert loss == pytest.approx(loss1, rel=1e-5), case
                assert norm2 == pytest.approx(norm21, rel=1e-5), case
            for key, tensor in final.items():
                assert (end[key] - tensor).abs().max() < 1e-5, (case, key)


# ------------------------------------------------------------------ nothing leaks between calls


def check_sums(rank: int, layout: Layout, sharded: bool) -> None:
    engine = engine_of(layout, rank, engine={"distributed_optimizer": sharded})
    loss = NllWithEntropy()
    batches = data(layout, rank)
    seeds = [0] * len(batches)

    first = engine.accumulate(batches, loss, seeds)
    gradients = [g.clone() for g in engine.gradients()]
    assert engine.squared_norm(gradients) > 0
    again = engine.accumulate(batches, loss, seeds)
    assert torch.equal(first, again)
    assert all(torch.equal(a, b) for a, b in zip(gradients, engine.gradients(), strict=True)), "gradients leaked"

    # A contribution of nothing is zeros, and leaves nothing behind either.
    nothing = engine.accumulate([], loss, [])
    assert not nothing.any() and not any(g.any() for g in engine.gradients())

    # Other micro-batches, the same sums: a batch of 4 in one piece, or in rows of one.
    whole = batch(5, 4, 10)
    together = engine.accumulate([whole], loss, [0])
    gradients = [g.clone() for g in engine.gradients()]
    split = engine.accumulate([whole.slice(i, i + 1) for i in range(4)], loss, [0] * 4)
    assert torch.allclose(together, split, rtol=1e-6)
    for a, b in zip(gradients, engine.gradients(), strict=True):
        assert (a - b).abs().max() <= 1e-5 * a.abs().max()

    # A micro-batch without any counted token trains nothing but still runs on every stage.
    silent = whole.with_tensors(loss_mask=torch.zeros_like(whole.tensors["loss_mask"]))
    sums = engine.accumulate([silent], loss, [0])
    assert not sums.any() and not any(g.any() for g in engine.gradients())

    # Inner data-parallel ranks may have unequal numbers of micro-batches, even none.
    if layout.dp == 2:
        mine = [whole] if layout.position(rank).dp == 0 else []
        alone = engine.accumulate(mine, loss, [0] * len(mine))
        assert torch.allclose(alone, together / 2, rtol=1e-6)

    with pytest.raises(EverstepError, match="seed"):
        engine.accumulate([whole], loss, [])
    # An error in the user's loss passes through unchanged, and the engine goes on.
    with pytest.raises(ZeroDivisionError):
        engine.accumulate([whole], Broken(), [0])
    assert torch.equal(engine.accumulate([whole], loss, [0]), together)


class Broken(NllWithEntropy):
    def __call__(self, *args: Any) -> Any:
        raise ZeroDivisionError("in the loss")


def test_nothing_leaks_between_calls() -> None:
    run_ranks(check_sums, 1, Layout(), True)
    run_ranks(check_sums, 2, Layout(tp=2), False)
    run_ranks(check_sums, 2, Layout(dp=2), True)
    run_ranks(check_sums, 2, Layout(dp=2), False)


# ------------------------------------------------------------------ state


def check_state_copy(rank: int, layout: Layout, sharded: bool, dtype: str) -> None:
    sections = {"engine": {"distributed_optimizer": sharded}, "model": {"dtype": dtype}}
    join_world(rank, layout.ranks_per_replica, "source")
    source = engine_of(layout, rank, seed=3, **sections)
    fresh_names = list(source.state())
    assert sum(name.startswith("exp_avg/") for name in fresh_names) > 0, "moments must exist before the first step"
    one_step(source, data(layout, rank, 0))
    source.keep_reference()
    one_step(source, data(layout, rank, 1))
    saved = {name: tensor.clone() for name, tensor in source.state().items()}
    scalars, digest = source.state_scalars(), source.state_hash()
    assert scalars == {"adam_step": 2, "has_reference": True}
    if dtype == "bfloat16":
        masters = {n: t for n, t in saved.items() if n.startswith("master/")}
        assert masters and all(t.dtype == torch.float32 for t in masters.values())
        assert all(t.dtype == torch.bfloat16 for n, t in saved.items() if n.startswith("param/"))
    next_sums = source.accumulate(data(layout, rank, 2), NllWithEntropy(), [0] * len(data(layout, rank, 2)))
    next_norm = source.squared_norm(source.gradients())
    source.apply(source.gradients(), SCALE, LR)
    reference = source.logprobs(data(layout, rank, 0), model="reference")
    next_digest = source.state_hash()
    assert next_digest != digest
    source.close()

    # A spare: another process in life, another world and undefined weights here.
    join_world(rank, layout.ranks_per_replica, "spare")
    spare = engine_of(layout, rank, seed=None, **sections)
    spare.init_random(99)
    assert list(spare.state()) == fresh_names, "a spare must have every tensor before it has made a step"
    spare.load_scalars(scalars)
    views = spare.state()
    assert list(views) == list(saved)
    with torch.no_grad():
        for name, view in views.items():
            view.copy_(saved[name])
    assert spare.state_hash() == digest
    assert torch.equal(spare.accumulate(data(layout, rank, 2), NllWithEntropy(), [0] * len(data(layout, rank, 2))), next_sums)
    assert spare.squared_norm(spare.gradients()) == next_norm
    spare.apply(spare.gradients(), SCALE, LR)
    assert spare.state_hash() == next_digest
    for a, b in zip(reference or [], spare.logprobs(data(layout, rank, 0), model="reference") or [], strict=True):
        assert torch.equal(a, b)

    # The collective half of apply can be repeated: parameters come back from the master shards.
    before = spare.state_hash()
    if sharded or dtype == "bfloat16":
        own = {n.removeprefix("exp_avg/") for n in spare.state() if n.startswith("exp_avg/")}
        with torch.no_grad():
            for name, view in spare.state().items():
                if name.startswith("param/") and (dtype == "bfloat16" or name.removeprefix("param/") not in own):
                    view.zero_()
        spare.gather_parameters()
        assert spare.state_hash() == before
    # One changed bit anywhere changes the hash; so does the step counter.
    name, view = list(spare.state().items())[-1]
    kept = view.view(-1)[0].clone()
    view.view(-1)[0] += 1
    assert spare.state_hash() != before, name
    view.view(-1)[0] = kept
    assert spare.state_hash() == before
    spare.load_scalars({"adam_step": 7, "has_reference": True})
    assert spare.state_hash() != before
    spare.close()
    spare.close()
    with pytest.raises(EverstepError, match="closed"):
        spare.state()


@pytest.mark.parametrize(
    ("layout", "sharded", "dtype"),
    [
        (Layout(), True, "float32"),
        (Layout(dp=2), True, "float32"),
        (Layout(dp=2), True, "bfloat16"),
        (Layout(pp=2), False, "bfloat16"),
        (Layout(tp=2), False, "float32"),
        (Layout(pp=2, vpp=2), True, "bfloat16"),
    ],
)
def test_state_copied_into_a_spare(layout: Layout, sharded: bool, dtype: str) -> None:
    run_ranks(check_state_copy, layout.ranks_per_replica, layout, sharded, dtype, join=False)


def check_reference(rank: int) -> None:
    layout = Layout(tp=2)
    engine = engine_of(layout, rank)
    with pytest.raises(EverstepError, match="keep_reference"):
        engine.logprobs(data(layout, rank), model="reference")
    start = engine.logprobs(data(layout, rank))
    engine.keep_reference()
    for step in range(2):
        one_step(engine, data(layout, rank, step))
    kept, moved = engine.logprobs(data(layout, rank), model="reference"), engine.logprobs(data(layout, rank))
    assert (start is None) == (rank != 0)
    for a, b, c in zip(start or [], kept or [], moved or [], strict=True):
        assert torch.allclose(a, b, atol=1e-6)  # not bitwise: the weights lie elsewhere in memory
        assert not torch.allclose(a, c, atol=1e-2)


def test_reference_is_frozen() -> None:
    run_ranks(check_reference, 2)


# ------------------------------------------------------------------ random numbers


def check_dropout(rank: int, layout: Layout) -> list[float]:
    hf = tiny_config("qwen3", attention_dropout=0.5)
    join_world(rank, layout.ranks_per_replica, "plain")
    engine = engine_of(layout, rank, hf=hf)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    losses = []
    for seeds in ([1, 2], [1, 2], [3, 2], [2, 1]):
        sums = engine.accumulate([batch(1, 2, 8), batch(1, 2, 8)], NllWithEntropy(), seeds)
        losses.append(float(sums[1]))
    assert torch.equal(torch.get_rng_state(), before), "the process's own random numbers were disturbed"
    a, same, other, swapped = losses
    assert a == same != other
    # A micro-batch's numbers depend on its seed alone: not on its neighbours, not on its place in the list.
    assert a == pytest.approx(swapped, rel=1e-6)
    gradients = [g.clone() for g in engine.gradients()]
    engine.close()
    # Recomputation draws the same numbers again: were backward's dropout another one, the gradients would differ.
    join_world(rank, layout.ranks_per_replica, "recompute")
    engine = engine_of(layout, rank, hf=hf, engine={"recompute": "full"})
    engine.accumulate([batch(1, 2, 8), batch(1, 2, 8)], NllWithEntropy(), [2, 1])
    for x, y in zip(gradients, engine.gradients(), strict=True):
        assert torch.allclose(x, y, rtol=1e-5, atol=1e-6)
    return losses


def test_dropout_follows_the_seeds() -> None:
    run_ranks(check_dropout, 1, Layout(), join=False)
    run_ranks(check_dropout, 2, Layout(tp=2), join=False)


# ------------------------------------------------------------------ bfloat16


def check_bfloat16(rank: int, layout: Layout, sharded: bool) -> list[float]:
    engine = engine_of(layout, rank, model={"dtype": "bfloat16"}, engine={"distributed_optimizer": sharded})
    # Steps so small that bfloat16 weights alone would not move: the float32 masters must carry them.
    one = batch(1, 4, 12)
    tiny = 2e-5
    losses = [one_step(engine, [one], lr=tiny)[0] for _ in range(4)]
    assert all(g.dtype == torch.float32 for g in engine.gradients())
    masters = [t for n, t in engine.state().items() if n.startswith("master/")]
    moved = sum(int((t != t.bfloat16().float()).sum()) for t in masters)
    assert moved > 0.5 * sum(t.numel() for t in masters)
    losses += [one_step(engine, [one], lr=LR)[0] for _ in range(25)]
    assert losses[-1] < 0.6 * losses[0], losses
    assert all(t.dtype == torch.bfloat16 for _, t in engine.export_hf())
    return losses


def test_bfloat16_trains() -> None:
    run_ranks(check_bfloat16, 1, Layout(), True)
    run_ranks(check_bfloat16, 2, Layout(pp=2), False)


# ------------------------------------------------------------------ closing


def sockets() -> int:
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return count


def check_rebuild(rank: int, layout: Layout) -> list[int]:
    import torch.distributed as dist

    counts = []
    for life in range(4):
        join_world(rank, layout.ranks_per_replica, f"life{life}")
        engine = engine_of(layout, rank)
        one_step(engine, data(layout, rank))
        views = engine.state()  # held across close(), as a healing rank holds them
        open_sockets = sockets()
        engine.close()
        assert not dist.is_initialized()
        assert not dist.distributed_c10d._world.pg_map
        assert sockets() < open_sockets
        assert views["exp_avg/decoder.final_layernorm.weight" if rank else "exp_avg/embedding.word_embeddings.weight"].any()
        counts.append(sockets())
    return counts


def test_rebuilding_leaks_no_groups() -> None:
    for counts in run_ranks(check_rebuild, 2, Layout(pp=2), join=False):
        assert counts[0] == counts[-1], f"open sockets after each life: {counts}"


VICTIM = 3


def check_death(rank: int) -> float:
    layout = Layout(tp=2, pp=2)
    engine = engine_of(layout, rank)
    one_step(engine, data(layout, rank))
    died = time.monotonic()
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(ReplicaBroken):
        for _ in range(100):
            one_step(engine, data(layout, rank))
    engine.close()
    seconds = time.monotonic() - died
    # This rank lives on and can join another world.
    join_world(rank, 3, "survivors")
    single = Layout(dp=3)
    again = engine_of(single, rank)
    one_step(again, data(single, rank))
    again.close()
    return seconds


def test_survivors_learn_of_a_death_and_rebuild() -> None:
    """The groups' timeout is 60 s; rank 0 shares no group but the world with the victim."""
    seconds = run_ranks(check_death, 4, may_die=(VICTIM,), deadline_s=50)
    assert max(seconds[:VICTIM]) < 10, seconds


# ------------------------------------------------------------------ weights from elsewhere


def check_sources(rank: int, folder: str) -> None:
    from pathlib import Path

    from transformers import AutoModelForCausalLM

    from everstep.engine.step import Engine
    from everstep.errors import BadInput

    hf = tiny_config("llama")
    model = hf_model(hf)
    layout = Layout()
    engine = Engine(settings(), hf, layout.position(0), layout, CPU)
    model.save_pretrained(folder, max_shard_size="20KB")
    assert (Path(folder) / "model.safetensors.index.json").is_file()
    engine.load_pretrained(Path(folder))
    exported = dict(engine.export_hf())
    assert all(torch.equal(exported[k], v) for k, v in model.state_dict().items())
    # What comes out can be loaded by transformers.
    again = AutoModelForCausalLM.from_config(hf)
    again.load_state_dict(exported, strict=True)

    incomplete = model.state_dict()
    del incomplete["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(BadInput, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        engine.load_pretrained(incomplete)
    wrong = {**model.state_dict(), "model.norm.weight": torch.ones(5)}
    with pytest.raises(BadInput, match=r"model\.norm\.weight has shape \(5,\)"):
        engine.load_pretrained(wrong)

    # init_random is distributed as transformers' own.
    engine.init_random(1)
    ours = dict(engine.export_hf())
    theirs = AutoModelForCausalLM.from_config(hf).state_dict()
    for name, tensor in theirs.items():
        assert ours[name].std(correction=0) == pytest.approx(float(tensor.std(correction=0)), rel=0.1, abs=1e-6), name
        assert ours[name].mean() == pytest.approx(float(tensor.mean()), abs=0.02), name
    assert len({float(t.flatten()[0]) for n, t in ours.items() if "norm" not in n}) > 20, "tensors share their numbers"


def test_weights_in_and_out(tmp_path: Any) -> None:
    run_ranks(check_sources, 1, str(tmp_path))
