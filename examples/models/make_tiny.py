"""Write examples/models/tiny-qwen3: a Qwen3 model of about 90 thousand parameters, without weights, and its tokenizer.

    python examples/models/make_tiny.py [--moe] [FOLDER]

With --moe: examples/models/tiny-qwen3-moe, the same with 8 experts in each layer, of which 2 take a token, and an auxiliary loss.

The tokenizer has one token per printable ASCII character and a small chat template, so prompts, text and chats all work
and every token can be read. The configuration has no weights beside it: train with ``model.init=random``.

The vocabulary is padded to 128 and heads, key-value heads and layers are even, so that tensor and pipeline parallelism
of 2 work. ``initializer_range`` is Qwen3's own.
"""

from __future__ import annotations

import argparse
import json
import string
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unk|>"]
CHARACTERS = "\n" + "".join(sorted(string.digits + string.ascii_letters + string.punctuation + " "))

# {% generation %} marks what the assistant wrote: transformers can then return a mask of exactly those tokens.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *CHARACTERS])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<|unk|>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()  # join without spaces
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|unk|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def config(moe: bool) -> PreTrainedConfig:
    sizes: dict[str, Any] = dict(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<|im_end|>"),
        pad_token_id=SPECIAL.index("<|endoftext|>"),
        dtype="float32",
    )
    if not moe:
        return Qwen3Config(architectures=["Qwen3ForCausalLM"], **sizes)
    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
        **sizes,
    )


def main(folder: Path, moe: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer().save_pretrained(folder)
    config(moe).save_pretrained(folder)
    print(f"{folder}: {', '.join(sorted(p.name for p in folder.iterdir()))}")
    print(json.dumps({k: v for k, v in config(moe).to_dict().items() if k in ("hidden_size", "num_hidden_layers", "vocab_size")}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--moe", action="store_true", help="experts in the place of the feed-forward layers")
    chosen = parser.parse_args()
    main(chosen.folder or Path(__file__).parent / ("tiny-qwen3-moe" if chosen.moe else "tiny-qwen3"), chosen.moe)
