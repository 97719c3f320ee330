"""Pairs: read, cut so that they stay together, and their loss against the formula written out."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.runs import ROOT, config
from transformers import AutoTokenizer

from everstep.cluster.batch import TrainingBatch
from everstep.cluster.slots import cut_slots
from everstep.config.derive import sizes
from everstep.config.schema import TrainConfig
from everstep.data import SampleStream
from everstep.data.preferences import Preferences, prepare_preferences
from everstep.errors import BadInput, ConfigError, WorkerFailed
from everstep.rl.preference import dpo_loss, dpo_terms

TINY = ROOT / "examples" / "models" / "tiny-qwen3"
DPO = str(ROOT / "examples" / "dpo_sort.yaml")


USER = {"role": "user", "content": "a"}


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


def pairs(tokenizer, records: list[dict], max_tokens: int = 100, too_long: str = "error") -> Preferences:
    return prepare_preferences(records, tokenizer, max_tokens, too_long)  # type: ignore[arg-type]


def counted(tokenizer, sample) -> str:
    return tokenizer.decode([t for t, m in zip(sample.input_ids, sample.loss_mask, strict=True) if m])


def test_only_the_completions_count(tokenizer) -> None:
    user, said = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "what?"}
    again = {"role": "user", "content": "again"}
    data = pairs(tokenizer, [
        {"prompt": "21>", "chosen": "12", "rejected": "2"},
        {"prompt": [user], "chosen": "two", "rejected": [{"role": "assistant", "content": "3"}]},
        {"prompt": [user, said, again], "chosen": "two", "rejected": "3"},
    ])  # fmt: skip
    assert len(data) == 3
    assert [counted(tokenizer, s) for s in data.samples] == ["12<|im_end|>", "2<|im_end|>"] + ["two<|im_end|>", "3<|im_end|>"] * 2
    batch = data.batch(SampleStream(3, seed=0, shuffle=False).take(2))
    assert batch.sample_ids == ["0/0#chosen", "0/0#rejected", "0/1#chosen", "0/1#rejected"] and batch["chosen"].tolist() == [1, 0, 1, 0]
    assert data.first(9).sample_ids[-1] == "data.source/2#rejected"


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"prompt": "a", "chosen": "b"}, "record 0 has no 'rejected'"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "prefers a completion to itself"),
        ({"prompt": "a", "chosen": ["b"], "rejected": "c"}, "is a list, not a string"),
        ({"prompt": [{"role": "user", "content": "a"}], "chosen": "b", "rejected": None}, "record 0 has no 'rejected'"),
        ({"prompt": [{"role": "user", "content": "a"}], "chosen": "b", "rejected": 3}, "'rejected' of record 0 must be a non-empty list"),
        ({"prompt": [{"role": "user", "content": "a"}], "chosen": "b", "rejected": ["c"]}, "'rejected' of record 0: message 0 has no role"),
        ({"prompt": [USER], "chosen": "b", "rejected": [USER]}, "must be a string, or messages that end"),
        ({"prompt": [USER], "chosen": "b", "rejected": [{"role": "assistant", "content": None}]}, "message 0 has no content of type string"),
        ({"prompt": [USER], "chosen": "b", "rejected": [{"content": "x"}, {"role": "assistant", "content": "y"}]}, "message 0 has no role"),
        ({"prompt": "a", "chosen": "b", "rejected": "c\ud83d"}, r"'rejected' of record 0 is no text: character 1 is '\\ud83d', half of a pair"),
        ({"chosen": "b", "rejected": "c"}, "record 0 has no 'prompt'"),
    ],
)
def test_bad_records_are_named(tokenizer, record: dict, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        pairs(tokenizer, [record])


def test_a_pair_is_dropped_or_cut_as_a_whole(tokenizer) -> None:
    records = [{"prompt": "12>", "chosen": "1", "rejected": "123456"}, {"prompt": "1>", "chosen": "1", "rejected": "2"}]
    with pytest.raises(BadInput, match=r"record 0 has 10 tokens, more than data\.max_tokens=6"):
        pairs(tokenizer, records, 6)
    with pytest.raises(BadInput, match=r"record 0 has 10 tokens, more than data\.max_tokens=3, and 1 more records are too long"):
        pairs(tokenizer, records, 3)
    dropped = pairs(tokenizer, records, 6, "drop")
    assert len(dropped) == 1 and [(d.record, d.reason) for d in dropped.dropped] == [(0, "10 tokens, data.max_tokens=6")]
    cut = pairs(tokenizer, records, 6, "truncate_right")
    assert [tokenizer.decode(s.input_ids) for s in cut.samples[:2]] == ["12>1<|im_end|>", "12>123"] and len(cut) == 2
    with pytest.raises(BadInput, match="none of 2 records can be used"):
        pairs(tokenizer, records, 2, "truncate_right")


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_pair_is_always_in_one_micro_batch(data: st.DataObject) -> None:
    count, dp = data.draw(st.integers(2, 12)), data.draw(st.integers(1, 2))
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=2 * count, max_size=2 * count))
    real = (torch.arange(12) < torch.tensor(lengths).unsqueeze(1)).long()
    batch = TrainingBatch(
        {"attention_mask": real, "chosen": torch.tensor([1.0, 0.0]).repeat(count)},
        sample_ids=[f"{i}#{side}" for i in range(count) for side in ("chosen", "rejected")],
    )
    budget = data.draw(st.integers(24, 60))
    slots = cut_slots(batch, TrainConfig(tokens_per_micro_batch=budget), dp)
    ids = [micro.sample_ids for slot in slots for micro in slot]
    assert sorted(s for micro in ids for s in micro) == sorted(batch.sample_ids)
    assert all(sum(micro.token_counts()) <= budget for slot in slots for micro in slot if len(micro))
    for micro in ids:
        assert [s.partition("#") for s in micro[::2]] == [(a, "#", "chosen") for a in (s.partition("#")[0] for s in micro[1::2])]


def test_the_loss_and_its_gradient_are_the_formulas() -> None:
    generator = torch.Generator().manual_seed(0)
    new, ref = (torch.randn(4, 5, generator=generator, dtype=torch.float64) - 2 for _ in range(2))
    mask = torch.tensor([[0, 1, 1, 0, 0], [0, 1, 1, 1, 1], [0, 0, 1, 1, 0], [0, 1, 0, 0, 0]], dtype=torch.float64)
    new.requires_grad_()
    beta, smoothing = 0.3, 0.1
    batch = TrainingBatch({"ref_logprobs": ref, "loss_mask": mask, "chosen": torch.tensor([1.0, 0, 1, 0])}, sample_ids=list("abcd"))
    out = dpo_loss(beta, smoothing)(new, None, batch)
    (out.loss_sum / out.weight).backward()
    d = ((new.detach() - ref) * mask).sum(dim=1).tolist()
    margins = [beta * (d[0] - d[1]), beta * (d[2] - d[3])]
    sigmoid = lambda m: 1 / (1 + math.exp(-m))
    want = [-(1 - smoothing) * math.log(sigmoid(m)) - smoothing * math.log(sigmoid(-m)) for m in margins]
    assert float(out.loss_sum / out.weight) == pytest.approx(sum(want) / 2) and out.weight == 2
    for i, m in zip((0, 2), margins, strict=True):
        slope = beta * (smoothing * sigmoid(m) - (1 - smoothing) * sigmoid(-m)) / 2
        assert new.grad is not None
        torch.testing.assert_close(new.grad[i], slope * mask[i])
        torch.testing.assert_close(new.grad[i + 1], -slope * mask[i + 1])
    means = {name: float(total / weight) for name, (total, weight) in out.metrics.items()}
    assert means["dpo/reward_margin"] == pytest.approx(sum(margins) / 2) and means["dpo/accuracy"] == sum(m > 0 for m in margins) / 2
    assert means["dpo/reward_chosen"] - means["dpo/reward_rejected"] == pytest.approx(means["dpo/reward_margin"])
    garbage = torch.where(mask > 0, new.detach(), float("nan"))
    assert torch.equal(dpo_terms(garbage, ref, mask, beta).loss, dpo_terms(new.detach(), ref, mask, beta).loss)


@pytest.mark.parametrize("kind", ["hinge", "ipo"])
def test_other_losses_of_the_same_margin(kind: str) -> None:
    """Margins -0.3, 0.7, 2.0 of pairs of two tokens each; the formulas, and their derivatives by hand."""
    beta, margins = 0.5, [-0.3, 0.7, 2.0]
    ref = torch.zeros(6, 2, dtype=torch.float64)
    new = torch.tensor([[m / beta + 0.25, 0.25] if side else [0.5, 0.0] for m in margins for side in (1, 0)], dtype=torch.float64, requires_grad=True)
    batch = TrainingBatch({"ref_logprobs": ref, "loss_mask": torch.ones(6, 2), "chosen": torch.tensor([1.0, 0] * 3)}, sample_ids=list("abcdef"))
    out = dpo_loss(beta, kind=kind)(new, None, batch)
    (out.loss_sum / out.weight).backward()
    want = [max(0.0, 1 - m) if kind == "hinge" else (m / beta - 1 / (2 * beta)) ** 2 for m in margins]
    slopes = [-beta * (m < 1) if kind == "hinge" else 2 * (m / beta - 1 / (2 * beta)) for m in margins]
    assert float(out.loss_sum) == pytest.approx(sum(want)) and out.weight == 3
    expected = torch.tensor([[sign * slope / 3] * 2 for slope in slopes for sign in (1, -1)], dtype=torch.float64)
    torch.testing.assert_close(new.grad, expected)
    with pytest.raises(ConfigError, match=r"dpo\.label_smoothing=0\.1 belongs to dpo\.loss=sigmoid"):
        dpo_loss(beta, 0.1, kind)


def test_a_pair_that_was_parted_is_an_error_and_not_another_loss() -> None:
    batch = TrainingBatch({"ref_logprobs": torch.zeros(2, 2), "loss_mask": torch.ones(2, 2), "chosen": torch.tensor([0.0, 1.0])}, sample_ids=["a", "b"])
    with pytest.raises(WorkerFailed, match="not side by side"):
        dpo_loss()(torch.zeros(2, 2), None, batch)


def test_sizes_and_refusals(tmp_path: Path) -> None:
    main = sizes(config(DPO, tmp_path)).main
    assert (main.samples_per_step, main.samples_per_slot, main.slots) == (256, 64, 4)
    packed = sizes(config(DPO, tmp_path, "train.micro_batch_size=null", "train.tokens_per_micro_batch=64")).main
    assert packed.samples_per_step == 256 and packed.slots == 32 and packed.max_tokens == 8
    with pytest.raises(ConfigError, match=r"train\.micro_batch_size=3 would part pairs"):
        sizes(config(DPO, tmp_path, "train.micro_batch_size=3"))
    with pytest.raises(ConfigError, match=r"too small for a sample of 16 tokens, which is what 2\*data\.max_tokens"):
        sizes(config(DPO, tmp_path, "train.micro_batch_size=null", "train.tokens_per_micro_batch=15"))
    from everstep.config.check import check_plan

    with pytest.raises(ConfigError, match=r"dpo\.label_smoothing=0\.1 belongs to"):
        check_plan(config(DPO, tmp_path, "dpo.loss=ipo", "dpo.label_smoothing=0.1"))
    for wrong in (["data.format=text"], ["recipe=sft", "sft.samples_per_step=256"]):
        with pytest.raises(ConfigError, match="pairs are for recipe=dpo"):
            check_plan(config(DPO, tmp_path, *wrong))


def test_a_pair_that_is_the_same_once_it_is_cut_is_dropped(tokenizer) -> None:
    """Its margin would be 0 for ever."""
    data = pairs(tokenizer, [{"prompt": "21>", "chosen": "12", "rejected": "1"}, {"prompt": "2>", "chosen": "2", "rejected": "1"}], 4, "truncate_right")
    assert len(data) == 1 and [(d.record, d.reason) for d in data.dropped] == [
        (0, "chosen and rejected are the same once they are cut to data.max_tokens=4")
    ]
