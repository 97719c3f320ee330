"""Tiny models and batches for tests: real transformers models of every supported family, in float32."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from everstep.cluster.batch import TrainingBatch
from everstep.config.schema import Config
from everstep.engine.loss import LossOutput
from everstep.layout import Layout

VOCAB = 101  # odd: must be padded for tp=2


def tiny_config(family: str, *, tied: bool = False, **changes: Any) -> Any:
    """A transformers config: 4 layers, 4 heads in 2 groups. ``qwen3_moe``: 8 experts, of which 3, but layer 1 dense; ``mixtral``:
    4 experts, of which 2."""
    from transformers import LlamaConfig, MixtralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    kinds = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "qwen3_moe": Qwen3MoeConfig, "mixtral": MixtralConfig}
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,  # large, so that a wrong layer shows
    }
    if family in ("qwen3", "qwen3_moe"):
        settings["head_dim"] = 16  # not hidden_size / heads
    if family == "qwen3_moe":
        settings |= {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "mlp_only_layers": [1], "norm_topk_prob": True}
    if family == "mixtral":
        settings |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    return kinds[family](**{**settings, **changes})


def like_example(folder: Path, name: str = "tiny-qwen3", **changes: Any) -> Path:
    """``folder``, made: the model of the examples, tokenizer and all, with ``changes`` of its configuration."""
    shutil.copytree(Path(__file__).parents[2] / "examples" / "models" / name, folder)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | changes))
    return folder


@dataclass(frozen=True)
class Case:
    """A layout with its engine settings and adapters. Six layers: 4 stages are uneven. Biases and q/k norms are replicated over tp."""

    layout: Layout
    family: str = "qwen3"
    tied: bool = True
    engine: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> Any:
        biases = {"attention_bias": True, "mlp_bias": True} if self.family == "llama" else {}
        return tiny_config(self.family, tied=self.tied, num_hidden_layers=6, **biases)


def hf_model(hf_config: Any, seed: int = 0) -> Any:
    """The transformers model of ``hf_config``, norms and biases made non-trivial so that losing one shows."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager").float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def saved_weights(model: Any) -> dict[str, Tensor]:
    """The weights under the names by which transformers saves them: those in memory, but for experts, which it fuses there."""
    from transformers.core_model_loading import revert_weight_conversion

    held = {k: v for k, v in model.state_dict().items() if not (k == "lm_head.weight" and model.config.tie_word_embeddings)}
    return dict(revert_weight_conversion(model, held))


def saved_gradients(model: Any) -> dict[str, Tensor]:
    """The gradients under those names."""
    gradients = copy.deepcopy(model)
    with torch.no_grad():
        for holder, parameter in zip(gradients.parameters(), model.parameters(), strict=True):
            holder.copy_(parameter.grad)
    return saved_weights(gradients)


def batch(seed: int, samples: int, tokens: int, vocab: int = VOCAB) -> TrainingBatch:
    """Right-padded random sequences; about half of the tokens count in the loss."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (samples, tokens), generator=generator)
    lengths = torch.randint(tokens // 2, tokens + 1, (samples,), generator=generator)
    attention = (torch.arange(tokens)[None] < lengths[:, None]).long()
    counted = attention * (torch.arange(tokens)[None] >= 2)
    return TrainingBatch(
        {"input_ids": ids * attention, "attention_mask": attention, "loss_mask": counted.float()},
        sample_ids=[f"{seed}/{i}" for i in range(samples)],
    )


def micro_batches(step: int) -> list[TrainingBatch]:
    """Five of different widths, none a multiple of anything; two data-parallel coordinates get 3 and 2 of them."""
    return [batch(10 * step + i, *shape) for i, shape in enumerate([(2, 9), (1, 13), (2, 7), (1, 5), (1, 11)])]


def rows(source: TrainingBatch, a: int, b: int) -> TrainingBatch:
    return source.slice(a, b)


def settings(**sections: Any) -> Config:
    """A configuration with the given sections, e.g. ``engine={"recompute": "full"}``."""
    model = {"path": "unused", **sections.pop("model", {})}
    return Config(recipe="sft", model=model, data={"source": "unused"}, **sections)


class NllWithEntropy:
    """Token negative log-likelihood minus an entropy bonus: exercises both gradients."""

    metric_names = ("nll", "entropy")
    needs_entropy = True

    def __init__(self, entropy_coef: float = 0.1):
        self.entropy_coef = entropy_coef

    def weight(self, batch: TrainingBatch) -> Tensor:
        return batch.tensors["loss_mask"].sum()

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: TrainingBatch) -> LossOutput:
        assert entropy is not None
        mask = batch.tensors["loss_mask"]
        nll, spread, tokens = -(logprobs * mask).sum(), (entropy * mask).sum(), mask.sum()
        metrics = {"nll": (nll.detach(), tokens), "entropy": (spread.detach(), tokens)}
        return LossOutput(nll - self.entropy_coef * spread, tokens, metrics)


def reference_loss(model: Any, source: TrainingBatch, temperature: float, entropy_coef: float = 0.1) -> Tensor:
    """The same loss sum on the transformers model, written without any of our code."""
    logits = model(source.tensors["input_ids"]).logits[:, :-1].float() / temperature
    log_p = torch.log_softmax(logits, -1)
    taken = log_p.gather(-1, source.tensors["input_ids"][:, 1:, None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    mask = source.tensors["loss_mask"][:, 1:]
    return -(taken * mask).sum() - entropy_coef * (entropy * mask).sum()
