"""The sizes of a model that layouts and memory depend on, from its config.json. Imports no torch, so that ``everstep plan`` answers at once."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.errors import BadInput, first_line


@dataclass(frozen=True)
class ExpertShape:
    """The feed-forward layers that are mixtures of experts. ``sparse``: for every layer of the model whether it is one."""

    count: int  # of one layer
    per_token: int
    ffn: int  # of one expert
    sparse: tuple[bool, ...]


@dataclass(frozen=True)
class ModelShape:
    """The sizes that layouts and memory depend on."""

    architecture: str  # transformers' class name, "Qwen3ForCausalLM"
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool  # the output layer is the embedding

    experts: ExpertShape | None = None

    def sparse(self, layer: int) -> bool:
        """Whether the feed-forward layer number ``layer`` is a mixture of experts."""
        return self.experts is not None and self.experts.sparse[layer]

    def layer_parameters(self, layer: int, tp: int = 1) -> int:
        """Parameters of one transformer layer without its experts, on one of ``tp`` tensor-parallel ranks (biases and per-head norms,
        under 0.1%, not counted)."""
        matrices = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        whole = 2 * self.hidden  # norms
        if self.experts is not None and self.experts.sparse[layer]:
            whole += self.experts.count * self.hidden  # the router
        else:
            matrices += 3 * self.hidden * self.ffn
        return matrices // tp + whole

    def expert_parameters(self, layer: int) -> int:
        """Parameters of all experts of one layer; 0 of a dense one."""
        return 3 * self.hidden * self.experts.ffn * self.experts.count if self.experts and self.experts.sparse[layer] else 0

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        layers = sum(self.layer_parameters(layer) + self.expert_parameters(layer) for layer in range(self.layers))
        return layers + embeddings + self.hidden


def read(path: Path) -> ModelShape:
    """The sizes that a config.json says. ``BadInput``."""
    try:
        raw = json.loads(path.read_text())
        heads = raw["num_attention_heads"]
        return ModelShape(
            architecture=(raw.get("architectures") or ["unknown"])[0],
            layers=raw["num_hidden_layers"],
            hidden=raw["hidden_size"],
            ffn=raw["intermediate_size"],
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            vocab=raw["vocab_size"],
            # transformers' default for all of them is untied
            tied=bool(raw.get("tie_word_embeddings", False)),
            experts=_experts(raw),
        )
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as e:
        raise BadInput(f"{path} cannot be read: {first_line(e)}") from e
    except (KeyError, TypeError, AttributeError) as e:
        raise BadInput(f"{path} is not the configuration of a Llama, Qwen2, Qwen3, Qwen3-MoE or Mixtral model: {e!r} is missing") from e


def _experts(raw: Mapping[str, Any]) -> ExpertShape | None:
    """As ``read_architecture`` reads them, from the JSON alone."""
    kind = raw.get("model_type")
    if kind not in ("qwen3_moe", "mixtral"):
        return None
    count = raw["num_local_experts"] if "num_local_experts" in raw else raw["num_experts"]
    dense, step = raw.get("mlp_only_layers") or (), raw.get("decoder_sparse_step", 1)  # transformers' defaults
    if step < 1:
        raise BadInput(f"decoder_sparse_step={step} of the model's configuration must be at least 1: every so many layers one has experts")
    sparse = sparse_layers(kind, raw["num_hidden_layers"], count, dense, step)
    if not any(sparse):
        return None
    ffn = raw["intermediate_size"] if kind == "mixtral" else raw["moe_intermediate_size"]
    if not 1 <= raw["num_experts_per_tok"] <= count:
        raise BadInput(f"num_experts_per_tok={raw['num_experts_per_tok']} of the model's configuration: a layer has {count} experts")
    return ExpertShape(count, raw["num_experts_per_tok"], ffn, sparse)


def sparse_layers(kind: str, layers: int, experts: int, dense: Collection[int], step: int) -> tuple[bool, ...]:
    """For every layer whether it has experts. ``dense``, ``step``: Qwen3-MoE's mlp_only_layers and decoder_sparse_step."""
    return tuple(kind == "mixtral" or (n not in dense and experts > 0 and (n + 1) % step == 0) for n in range(layers))
