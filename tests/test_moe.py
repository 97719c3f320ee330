"""Mixtures of experts: against transformers, for every layout; routing as side state of a step; the auxiliary loss; files.

Rows of ``python -m benchmarks.parity`` compare more layouts, a full row of test_exact.py whole runs with deaths.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.test_engine_parity import EXPERTS, build, check_against_transformers, check_models

from everstep.cluster.batch import TrainingBatch
from everstep.errors import BadInput, ConfigError
from everstep.layout import Layout
from support.models import NllWithEntropy, batch, hf_model, reference_loss, saved_gradients, settings, tiny_config
from support.processes import join_world, run_ranks

CPU = torch.device("cpu")


# ------------------------------------------------------------------ one rank


def check_files(rank: int) -> None:
    """After a step of training: what is exported loads in transformers with equal log-probabilities, and comes back bitwise; so does
    what transformers holds in memory, where experts are fused."""
    from transformers import AutoModelForCausalLM

    from everstep.checkpoint.export import write_shards
    from everstep.engine.step import Engine

    for name in EXPERTS:
        join_world(0, 1, f"files-{name}")
        engine, _ = build(name, Layout(), rank)
        sums = engine.accumulate([batch(1, 2, 9)], NllWithEntropy(), [0])
        engine.apply(engine.gradients(), 1.0 / float(sums[0]), 1e-2)
        with tempfile.TemporaryDirectory() as folder:
            family, changes = EXPERTS[name]
            exported = dict(engine.export_hf())
            tiny_config(family, **changes).save_pretrained(folder)
            listed = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in exported.items()]
            write_shards(Path(folder), listed, exported.__getitem__, most_bytes=20_000)
            assert len(list(Path(folder).glob("*.safetensors"))) > 1
            one = batch(2, 3, 11)
            (scored,) = engine.logprobs([one]) or []
            engine.close()
            theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
            with torch.no_grad():
                log_p = torch.log_softmax(theirs(one["input_ids"]).logits[:, :-1], -1)
            wanted = log_p.gather(-1, one["input_ids"][:, 1:, None])[..., 0]
            real = one["attention_mask"][:, 1:].bool()
            assert (scored[:, 1:] - wanted)[real].abs().max() < 1e-4
            for number, source in enumerate((folder, theirs.state_dict())):
                join_world(0, 1, f"back-{name}-{number}")
                again = Engine(settings(), tiny_config(family, **changes), Layout().position(0), Layout(), CPU)
                again.load_pretrained(source)
                back = dict(again.export_hf())
                assert back.keys() == exported.keys() and all(torch.equal(back[k], exported[k]) for k in back)
                again.close()


def check_auxiliary_loss(rank: int) -> None:
    """Per micro-batch, weighed like its loss, padding left out; each layer's is what transformers computes for that layer alone."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    from everstep.engine.hf import join, pieces
    from everstep.engine.step import Engine

    join_world(0, 1, "auxiliary")
    hf_config = tiny_config("qwen3_moe", output_router_logits=True, router_aux_loss_coef=3.0)
    model = hf_model(hf_config).eval()
    engine = Engine(settings(), hf_config, Layout().position(0), Layout(), CPU)
    engine.load_pretrained(model.state_dict())
    batches = [batch(5, 3, 10), batch(6, 1, 13)]
    aux, chosen = 0.0, torch.zeros(3, 8)
    for one in batches:
        out = model(one["input_ids"], attention_mask=one["attention_mask"])
        per_layer = [load_balancing_loss_func((logits,), 8, 3, one["attention_mask"]) for logits in out.router_logits]
        weighed = one["loss_mask"].sum() * torch.stack(per_layer).mean()
        (reference_loss(model, one, 1.0) + 3.0 * weighed).backward()
        aux += float(weighed)
        for layer, logits in enumerate(out.router_logits):
            picked = logits.topk(3).indices[one["attention_mask"].reshape(-1).bool()]
            chosen[layer] += picked.flatten().bincount(minlength=8)
    sums = engine.accumulate(batches, NllWithEntropy(), [0, 0])
    assert torch.equal(sums[7:].view(3, 8), chosen.double())
    assert float(sums[6]) == pytest.approx(3.0 * aux, rel=1e-5)
    wanted = saved_gradients(model)
    mine = {n: p.main_grad for n, p in engine._ddps[0].module.named_parameters()}
    for piece in pieces(engine.arch, Layout()):
        for key, gradient in zip(piece.names, join(piece, [piece.of(mine)], engine.arch), strict=True):
            assert (gradient - wanted[key]).abs().max() <= 1e-4 * wanted[key].abs().max(), key

    own, metrics = engine.read_sums(sums.tolist())
    assert own == sums[:6].tolist()
    assert metrics["moe/aux_loss"] == pytest.approx(aux / float(sums[0]), rel=1e-5)
    assert metrics["moe/max_load"] == pytest.approx(float((chosen.amax(1) / chosen.mean(1)).mean()))
    assert metrics["moe/idle_experts"] == pytest.approx(float((chosen == 0).float().mean()))

    # Raw sums: the whole is the parts, in whatever company. No reduction order differs here, so to the bit.
    parts = [engine.accumulate([one], NllWithEntropy(), [0]) for one in batches]
    assert torch.equal(parts[0][7:] + parts[1][7:], sums[7:])
    alone = [g.clone() for g in engine.gradients()]
    engine.accumulate([batches[1]], NllWithEntropy(), [9])
    assert all(torch.equal(a, b) for a, b in zip(alone, engine.gradients(), strict=True))

    class Weightless(NllWithEntropy):
        weight = None

    with pytest.raises(BadInput, match=r"Weightless, which has no method weight\(batch\); add one, or set moe.aux_loss_coef=0"):
        engine.accumulate([batches[0]], Weightless(), [0])
    engine.close()


def check_one_rank(rank: int) -> None:
    check_models(rank, EXPERTS)
    check_files(rank)
    check_auxiliary_loss(rank)


def test_one_rank_against_transformers() -> None:
    run_ranks(check_one_rank, 1, join=False, deadline_s=120)


# ------------------------------------------------------------------ several


def side_state(rank: int, layout: Layout, name: str) -> torch.Tensor:
    """What a contribution of three micro-batches says of routing, and once more, all sums, when the same few experts get all tokens."""
    from everstep.engine.step import Engine

    join_world(rank, layout.ranks_per_replica, name)
    at, cut = layout.position(rank), {"sequence_parallel": layout.tp > 1}
    hf_config = tiny_config("qwen3_moe", output_router_logits=True, router_aux_loss_coef=3.0)
    engine = Engine(settings(engine=cut), hf_config, at, layout, CPU)
    engine.init_random(1)
    mine = [batch(5, 3, 10), batch(6, 1, 13), batch(7, 2, 8)][at.dp :: layout.dp]
    sums = engine.accumulate(mine, NllWithEntropy(), [0] * len(mine))[6:]
    # A restored state is the same state.
    digest, saved = engine.state_hash(), {n: t.clone() for n, t in engine.state().items()}
    engine.apply(engine.gradients(), 0.1, 1e-2)
    assert engine.state_hash() != digest
    engine.load_scalars(engine.state_scalars() | {"adam_step": 0})
    with torch.no_grad():
        for key, view in engine.state().items():
            view.copy_(saved[key])
    assert engine.state_hash() == digest
    # Ranks that exchange tokens take part in each other's micro-batches, also where one of them has none.
    scored = engine.logprobs([batch(8, 2, 7)] if at.dp == 0 else [])
    assert scored is None or [len(s) for s in scored] == ([2] if at.dp == 0 else [])
    with torch.no_grad():
        for key, view in engine.state().items():
            if key.startswith("param/") and key.endswith("router.weight"):
                view.zero_()
    starved = engine.accumulate(mine, NllWithEntropy(), [0] * len(mine))
    assert (starved[7:] > 0).sum() == 3 * 3
    engine.close()
    return torch.cat([sums, starved])


def same_routing(rank: list[torch.Tensor], one: torch.Tensor) -> bool:
    """Counts, which are whole, are equal; losses but for rounding."""
    whole = one == one.round()
    assert whole.sum() > 2 * 24
    return all(torch.equal(sums[whole], one[whole]) and torch.allclose(sums, one, rtol=1e-5) for sums in rank)


def check_layouts(rank: int, ranks: int, cases: list[tuple[str, Layout, bool]], routed: list[Layout]) -> list[Any]:
    for number, (name, layout, sharded) in enumerate(cases):
        join_world(rank, ranks, f"case{number}")
        check_against_transformers(rank, name, layout, sharded, steps=2)
    return [side_state(rank, layout, f"routed{number}") for number, layout in enumerate(routed)]


TWO = [
    ("qwen3-moe", Layout(dp=2, ep=2), True),
    ("mixtral", Layout(dp=2, ep=2), False),
    ("qwen3-moe", Layout(tp=2), True),
    ("qwen3-moe-plain", Layout(pp=2), True),
]
FOUR = [("qwen3-moe", Layout(dp=2, ep=2, tp=2), True), ("mixtral", Layout(dp=2, ep=2, pp=2), False), ("mixtral", Layout(dp=4, ep=2), True)]


def test_ranks_against_transformers_and_one_another() -> None:
    # Three micro-batches: the interleaved schedule, and the rank with one of them, fill up with empty ones, which are not counted.
    ((one,),) = run_ranks(check_layouts, 1, 1, [], [Layout()], join=False)
    two = run_ranks(check_layouts, 2, 2, TWO, [Layout(dp=2, ep=2), Layout(pp=2, vpp=2), Layout(cp=2, ep=2)], join=False, deadline_s=180)
    assert all(same_routing(rank, one) for rank in two)


@pytest.mark.full
def test_four_ranks_against_transformers() -> None:
    ((one,),) = run_ranks(check_layouts, 1, 1, [], [Layout()], join=False)
    routed = [Layout(dp=2, ep=2, tp=2), Layout(cp=2, dp=2, ep=4), Layout(dp=2, ep=2, pp=2, vpp=2)]
    assert all(same_routing(rank, one) for rank in run_ranks(check_layouts, 4, 4, FOUR, routed, join=False, deadline_s=240))


# ------------------------------------------------------------------ without processes


def test_tokens_of_empty_and_weightless_micro_batches() -> None:
    from everstep.engine.moe import token_shares

    real = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert torch.equal(token_shares(real, 6.0), torch.tensor([[2.0, 2.0, 0.0], [2.0, 0.0, 0.0]]))
    assert torch.equal(token_shares(real, 0.0), -real.float())  # counted as routed, no loss
    assert torch.equal(token_shares(0 * real, 0.0), torch.zeros(2, 3))


def test_the_weight_of_a_loss_is_known_before_it_is_computed() -> None:
    from everstep.rl.losses import policy_loss, sft_loss

    one = batch(3, 3, 9)
    one = TrainingBatch(one.tensors | {"advantages": torch.ones(3, 9), "loss_mask": one["loss_mask"] * torch.tensor([[1.0], [0.0], [1.0]])}, sample_ids=one.sample_ids)
    for how in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
        for loss in (sft_loss(how), policy_loss(aggregation=how, on_policy=True, report_entropy=False)):
            assert float(loss.weight(one)) == float(loss(torch.zeros(3, 9), None, one).weight) > 0


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not supported: routing is a function of the token alone"),
        ("mixtral", {"sliding_window": 8}, "sliding_window=8"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 is not supported: a layer has 8 experts"),
    ],
)
def test_refused_models(family: str, changes: dict[str, Any], says: str) -> None:
    from everstep.engine.model import read_architecture

    with pytest.raises(BadInput, match=says):
        read_architecture(tiny_config(family, **changes))


def test_what_config_json_means() -> None:
    from everstep.engine.model import read_architecture

    balanced = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    found = read_architecture(tiny_config("qwen3_moe", **balanced)).experts
    assert found and (found.count, found.per_token, found.ffn, found.sparse) == (8, 3, 16, (True, False, True, True))
    assert found.aux_loss_coef == 0.5 and found.renormalized
    quiet = read_architecture(tiny_config("qwen3_moe", router_aux_loss_coef=0.5, norm_topk_prob=False)).experts
    assert quiet and quiet.aux_loss_coef == 0.0 and not quiet.renormalized
    asked = read_architecture(tiny_config("qwen3_moe", router_aux_loss_coef=0.5), 0.25).experts
    assert asked and asked.aux_loss_coef == 0.25
    assert read_architecture(tiny_config("qwen3_moe", decoder_sparse_step=5)).experts is None
    mixtral = read_architecture(tiny_config("mixtral")).experts
    assert mixtral and (mixtral.count, mixtral.ffn, all(mixtral.sparse), mixtral.renormalized) == (4, 48, True, True)


def test_adapters_on_experts_are_refused() -> None:
    from everstep.engine.hf import pieces
    from everstep.engine.lora import pieces as adapters
    from everstep.engine.model import read_architecture

    table = pieces(read_architecture(tiny_config("mixtral")), Layout())
    with pytest.raises(ConfigError, match=r"gate_proj, up_proj, down_proj match only matrices of experts.*lora.targets=\[qkv,proj\]"):
        adapters(table, settings(lora={"rank": 2}), Layout())
    assert len(adapters(table, settings(lora={"rank": 2, "targets": ["qkv", "proj"]}), Layout())) == 2 * 4 * 4
    # Where some layers are dense, those have adapters.
    mixed = pieces(read_architecture(tiny_config("qwen3_moe")), Layout())
    names = [p.names[0] for p in adapters(mixed, settings(lora={"rank": 2, "targets": ["fc1"]}), Layout())]
    assert names == [f"model.layers.1.mlp.{m}_proj.lora_{k}.weight" for m in ("gate", "up") for k in "AB"]
