"""Generation: what comes out is what the model would score, and depends on nothing but seed, sample and weights."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from everstep.cluster.batch import TrainingBatch
from everstep.data import Dataset, SampleRef, prepare_prompts
from everstep.errors import WorkerFailed
from everstep.rl.rollout import Sampling, repeat_prompts
from everstep.rl.rollout.noise import gumbel_noise, keep_likely, sample_keys
from everstep.rl.rollout.transformers import TransformersRollout
from support.models import saved_weights, tiny_config

TINY = Path(__file__).parent.parent / "examples" / "models" / "tiny-qwen3"
PROMPTS = ["314>", "sort 92746>", "0>", "a much longer prompt than the others>", "55>"]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def model():
    """Random weights, spread out enough that completions differ and some end early."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(TINY)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(6)
        model.lm_head.weight[config.eos_token_id] += 0.2  # likelier, so that both endings occur
    return model


@pytest.fixture(scope="module")
def rollout(model, tokenizer) -> TransformersRollout:
    made = TransformersRollout(model.config, tokenizer)
    made.load_weights(model.state_dict().items(), version=7)
    return made


@pytest.fixture(scope="module")
def data(tokenizer) -> Dataset:
    return prepare_prompts([{"prompt": p} for p in PROMPTS], tokenizer, 64, "error")


def samples(data: Dataset, n: int = 4) -> TrainingBatch:
    return repeat_prompts(data.batch([SampleRef(f"0/{i}", i) for i in range(len(data))]), n)


SAMPLING = Sampling(temperature=0.7, max_response_tokens=12, samples_per_batch=7, seed=3)


def by_id(batch: TrainingBatch) -> dict[str, tuple[list[int], str]]:
    ids, masks = batch["input_ids"].tolist(), batch["attention_mask"].tolist()
    tokens = [[t for t, m in zip(i, k, strict=True) if m] for i, k in zip(ids, masks, strict=True)]
    return dict(zip(batch.sample_ids, zip(tokens, batch.column("completion"), strict=True), strict=True))


def test_logprobs_are_those_of_a_teacher_forced_forward(rollout, model, data) -> None:
    """Left padding, cache and sampling must not change what a token's probability is."""
    out = rollout.generate(samples(data), SAMPLING)
    with torch.no_grad():
        logits = model(input_ids=out["input_ids"], attention_mask=out["attention_mask"]).logits
    logp = (logits[:, :-1] / SAMPLING.temperature).log_softmax(-1)
    expected = logp.gather(2, out["input_ids"][:, 1:].unsqueeze(2)).squeeze(2)
    mask = out["loss_mask"][:, 1:] > 0
    torch.testing.assert_close(out["rollout_logprobs"][:, 1:][mask], expected[mask], rtol=1e-4, atol=1e-4)
    assert out["rollout_logprobs"][out["loss_mask"] == 0].eq(0).all()


def test_layout_of_the_result(rollout, data, tokenizer) -> None:
    prompts = samples(data)
    out = rollout.generate(prompts, SAMPLING)
    assert out.sample_ids == prompts.sample_ids and out.weight_versions == [7] * len(prompts)
    assert out.column("record") == prompts.column("record") and out.column("group")[:5] == ["0/0"] * 4 + ["0/1"]
    endings = set()
    for row, sid in enumerate(out.sample_ids):
        real = int(out["attention_mask"][row].sum())
        assert out["attention_mask"][row].tolist() == [1] * real + [0] * (out.width - real), "right-padded"
        p = int(prompts["attention_mask"][row].sum())
        assert out["input_ids"][row, :p].tolist() == prompts["input_ids"][row, :p].tolist()
        assert out["loss_mask"][row].tolist() == [0] * p + [1] * (real - p) + [0] * (out.width - real)
        response = out["input_ids"][row, p:real].tolist()
        finished = out.column("finished")[row]
        endings.add(finished)
        assert tokenizer.eos_token_id not in response[:-1]
        assert (response[-1] == tokenizer.eos_token_id) == finished, f"{sid}: the mask includes the end token"
        assert finished or len(response) == SAMPLING.max_response_tokens
        assert out.column("completion")[row] == tokenizer.decode(response, skip_special_tokens=True)
    assert endings == {True, False}, "the test must see both endings"


@pytest.mark.parametrize("size", [1, 3, 20])
def test_a_sample_does_not_depend_on_its_batch(rollout, data, size: int) -> None:
    """Other batch sizes, another order, a part of the batch only: the same completions, sample by sample."""
    whole = by_id(rollout.generate(samples(data), SAMPLING))
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(size)).tolist()
    shuffled = samples(data).select(order[: 3 * len(order) // 4])
    other = Sampling(**{**vars(SAMPLING), "samples_per_batch": size})
    part = by_id(rollout.generate(shuffled, other))
    assert len(part) == 15 and part == {sid: whole[sid] for sid in part}


def test_seed_sample_and_weights_do_matter(rollout, data) -> None:
    first = by_id(rollout.generate(samples(data), SAMPLING))
    reseeded = by_id(rollout.generate(samples(data), Sampling(**{**vars(SAMPLING), "seed": 4})))
    assert sum(first[s] != reseeded[s] for s in first) > 15
    assert len({first[f"0/3#{k}"][1] for k in range(4)}) > 1, "samples of one prompt differ"


def test_greedy_is_the_argmax(rollout, model, data) -> None:
    out = rollout.generate(samples(data, 1), Sampling(temperature=0.0, max_response_tokens=6))
    again = rollout.generate(samples(data, 1), Sampling(temperature=0.0, max_response_tokens=6, seed=9))
    assert by_id(out) == by_id(again)
    with torch.no_grad():
        best = model(input_ids=out["input_ids"], attention_mask=out["attention_mask"]).logits[:, :-1].argmax(-1)
    mask = out["loss_mask"][:, 1:] > 0
    assert torch.equal(best[mask], out["input_ids"][:, 1:][mask])


def test_gumbel_noise_draws_from_the_distribution() -> None:
    """Frequencies of 20000 draws against the probabilities (chi-square, fixed seed), and independence of steps."""
    logp = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.02, 0.01]).log()
    n = 20000
    keys = sample_keys(0, [str(i) for i in range(n)])
    counts = torch.zeros(6, 6)
    first = (logp + gumbel_noise(keys, 0, 6)).argmax(1)
    second = (logp + gumbel_noise(keys, 1, 6)).argmax(1)
    for a, b in zip(first.tolist(), second.tolist(), strict=True):
        counts[a, b] += 1
    expected = logp.exp().outer(logp.exp()) * n
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    assert chi2 < 35 + 4 * math.sqrt(70), f"chi-square {chi2:.1f} with 35 degrees of freedom"
    noise = gumbel_noise(keys[:200], 5, 500)
    assert torch.isfinite(noise).all()
    assert abs(float(noise.mean()) - 0.5772) < 0.02 and abs(float(noise.var()) - math.pi**2 / 6) < 0.03
    assert torch.equal(noise[17:18], gumbel_noise(keys[17:18], 5, 500)), "a row is a function of its own key"


def test_top_k_and_top_p_keep_what_they_should() -> None:
    logp = torch.tensor([[0.05, 0.4, 0.3, 0.15, 0.1], [0.96, 0.01, 0.01, 0.01, 0.01]]).log()
    kept = lambda k, p: [row.isfinite().nonzero().flatten().tolist() for row in keep_likely(logp, logp.clone(), k, p)]
    assert kept(0, 1.0) == [[0, 1, 2, 3, 4]] * 2
    assert kept(2, 1.0)[0] == [1, 2]
    assert kept(0, 0.6) == [[1, 2], [0]], "the nucleus includes the token that crosses top_p"
    assert kept(0, 0.75)[0] == [1, 2, 3]
    assert kept(3, 0.8)[0] == [1, 2], "top_p counts within what top_k left: 0.4/0.85 + 0.3/0.85 > 0.8"
    assert kept(99, 1e-9) == [[1], [0]], "one token always stays"


def test_top_k_of_one_is_greedy_through_generate(rollout, data) -> None:
    greedy = rollout.generate(samples(data, 1), Sampling(temperature=0.0, max_response_tokens=6))
    one = rollout.generate(samples(data, 1), Sampling(temperature=1.0, top_k=1, max_response_tokens=6, seed=1))
    assert by_id(greedy) == by_id(one)


def test_serves_nothing_without_a_complete_set_of_weights(model, tokenizer, data) -> None:
    made = TransformersRollout(model.config, tokenizer)
    with pytest.raises(WorkerFailed, match="before it was given weights"):
        made.generate(samples(data), SAMPLING)
    weights = dict(model.state_dict())
    made.load_weights(weights.items(), 3)
    incomplete = {k: v for k, v in weights.items() if k != "model.layers.1.mlp.up_proj.weight"}
    with pytest.raises(WorkerFailed, match=r"1 weights did not come.*up_proj"):
        made.load_weights(incomplete.items(), 4)
    with pytest.raises(WorkerFailed, match="before it was given weights"):
        made.generate(samples(data), SAMPLING)
    with pytest.raises(WorkerFailed, match=r"no weight called 'model.nope'"):
        made.load_weights({"model.nope": torch.zeros(1)}.items(), 4)
    with pytest.raises(WorkerFailed, match=r"shape \[1\], expected"):
        made.load_weights({"lm_head.weight": torch.zeros(1)}.items(), 4)


def test_tied_output_layer_may_be_left_out_or_given(tokenizer, data) -> None:
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(1)
    source = AutoModelForCausalLM.from_config(config)
    weights = dict(source.state_dict())
    without = {k: v for k, v in weights.items() if k != "lm_head.weight"}
    results = []
    for given in (weights, without):
        made = TransformersRollout(config, tokenizer)
        made.load_weights(given.items(), 1)
        results.append(by_id(made.generate(samples(data), SAMPLING)))
    assert results[0] == results[1]


def test_making_a_rollout_leaves_the_random_state_alone(model, tokenizer) -> None:
    torch.manual_seed(11)
    TransformersRollout(model.config, tokenizer)
    got = torch.rand(3)
    torch.manual_seed(11)
    assert torch.equal(got, torch.rand(3))


def test_an_empty_batch_and_a_single_sample(rollout, data) -> None:
    batch = samples(data, 1)
    assert len(rollout.generate(batch.slice(0, 0), SAMPLING)) == 0
    one = rollout.generate(batch.slice(1, 2), SAMPLING)
    both = TrainingBatch.concat([rollout.generate(batch.slice(0, 0), SAMPLING), one])
    assert both.sample_ids == ["0/1#0"]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_come_one_by_one(family, tokenizer):
    """The engine exports each matrix of each expert; transformers holds those of a layer in one tensor."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32)
    made, weights = TransformersRollout(model.config, tokenizer), saved_weights(model)
    made.load_weights(weights.items(), version=1)
    assert all(torch.equal(a, b) for a, b in zip(made.model.parameters(), model.parameters(), strict=True))
    lost = next(name for name in weights if ".experts.3." in name)
    with pytest.raises(WorkerFailed, match=rf"1 weights did not come, among them .*{lost}"):
        made.load_weights(((name, weight) for name, weight in weights.items() if name != lost), version=2)


@pytest.mark.parametrize("adapted", [False, True])
def test_an_engine_that_sleeps_serves_nothing_until_it_has_weights_again(model, tokenizer, data, adapted) -> None:
    rollout, module = TransformersRollout(model.config, tokenizer), "model.layers.0.self_attn.q_proj"
    out, into = model.state_dict()[f"{module}.weight"].shape
    adapter = [(f"{module}.lora_A.weight", torch.ones(2, into)), (f"{module}.lora_B.weight", torch.ones(out, 2))]

    def bring(version: int, first: bool = False) -> None:
        if first or not adapted:
            rollout.load_weights(model.state_dict().items(), None if adapted else version)
        if adapted:
            rollout.load_adapter(adapter, 0.5, version)

    rollout.sleep()
    bring(1, first=True)
    before = by_id(rollout.generate(samples(data), SAMPLING))
    rollout.sleep()
    assert adapted or not any(p.numel() for p in rollout.model.parameters()), "what comes anew takes no memory"
    with pytest.raises(WorkerFailed, match="before it was given weights"):
        rollout.generate(samples(data), SAMPLING)
    with pytest.raises(WorkerFailed, match=r"no weight called|does not fit"):
        rollout.load_adapter(adapter[:1], 0.5, 2) if adapted else rollout.load_weights([("x", torch.ones(1))], 2)
    rollout.sleep()  # half awake
    rollout.sleep()
    bring(3)
    after = rollout.generate(samples(data), SAMPLING)
    assert by_id(after) == before and after.weight_versions == [3] * len(after)
