"""Pairs for direct preference optimisation: two completions of one prompt, of which one was preferred.

A record holds ``prompt`` (string or messages), ``chosen`` and ``rejected``: strings, or messages that follow the prompt's. A
pair is two rows of a batch, side by side, the chosen one first; ``everstep.cluster.slots`` keeps them in one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from everstep.cluster.batch import TrainingBatch
from everstep.data.order import SampleRef
from everstep.data.prepare import (
    Dataset,
    Dropped,
    Tokens,
    TooLong,
    encode_chat,
    encode_prompt,
    messages_of,
    prompt_of,
    string_of,
    too_long_error,
    where,
)
from everstep.data.source import Record
from everstep.errors import BadInput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHOSEN = "chosen"
"""Name of the tensor (B,) that is 1 for the chosen row of a pair and 0 for the rejected one: 1, 0, 1, 0, ..."""


@dataclass(frozen=True)
class Preferences(Dataset):
    """Pairs. ``samples`` holds the chosen completion of pair i at 2 i and the rejected one at 2 i + 1; the length is that of pairs."""

    def __len__(self) -> int:
        return len(self.samples) // 2

    def batch(self, refs: Sequence[SampleRef]) -> TrainingBatch:
        """2 rows for each of ``refs``, ``ID#chosen`` and ``ID#rejected``, as ``Dataset.batch``, and the tensor ``chosen`` (B,)."""
        rows = [SampleRef(f"{ref.id}#{name}", 2 * ref.index + i) for ref in refs for i, name in enumerate((CHOSEN, "rejected"))]
        return super().batch(rows).with_tensors(chosen=torch.tensor([1.0, 0.0]).repeat(len(refs)))


def prepare_preferences(
    records: list[Record],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    too_long: TooLong,
    key: str = "data.source",
) -> Preferences:
    """Both completions of each record, with a loss mask of 1 on the tokens that are not the prompt's.

    A pair of which one completion is longer than ``max_tokens`` (prompt included) is refused, dropped, or both are cut, as
    ``too_long`` says. BadInput for a record that lacks its key, or whose two completions are the same.
    """
    samples: list[Tokens] = []
    dropped: list[Dropped] = []
    excess: list[tuple[int, int]] = []  # (record, tokens)
    for number, record in enumerate(records):
        pair = [_encode(number, record, side, tokenizer, key) for side in (CHOSEN, "rejected")]
        if pair[0].input_ids == pair[1].input_ids:
            raise BadInput(f"{key}: record {number} prefers a completion to itself: chosen and rejected are the same")
        longest = max(len(tokens.input_ids) for tokens in pair)
        if longest > max_tokens:
            if too_long == "error":
                excess.append((number, longest))
                continue
            if too_long == "drop":
                dropped.append(Dropped(number, f"{longest} tokens, data.max_tokens={max_tokens}"))
                continue
            part = slice(-max_tokens, None) if too_long == "truncate_left" else slice(max_tokens)
            pair = [Tokens(tokens.input_ids[part], tokens.loss_mask[part], tokens.columns) for tokens in pair]
            if pair[0].input_ids == pair[1].input_ids:
                dropped.append(Dropped(number, f"chosen and rejected are the same once they are cut to data.max_tokens={max_tokens}"))
                continue
        pair = [Tokens(tokens.input_ids, [0, *tokens.loss_mask[1:]], tokens.columns) for tokens in pair]
        if not all(any(tokens.loss_mask) for tokens in pair):
            dropped.append(Dropped(number, "no token to learn from"))
            continue
        samples += pair
    if excess:
        raise too_long_error(excess, max_tokens, key, "data.max_tokens")
    if not samples:
        raise BadInput(f"{key}: none of {len(records)} records can be used (record 0: {dropped[0].reason})")
    return Preferences(key, samples, dropped)


def _encode(number: int, record: Record, side: str, tokenizer: PreTrainedTokenizerBase, key: str) -> Tokens:
    prompt = prompt_of(number, record, key)
    if isinstance(prompt, str):
        text = string_of(number, record, side, key)
        ids = encode_prompt(tokenizer, prompt, where(number, "prompt", key))
        answer = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if tokenizer.eos_token_id is None:
            raise BadInput(f"{key}: the tokenizer has no end-of-sequence token, so the model could never learn to stop")
        answer.append(tokenizer.eos_token_id)
        return Tokens(ids + answer, [0] * len(ids) + [1] * len(answer))
    if isinstance(record.get(side), str):
        completion = [{"role": "assistant", "content": string_of(number, record, side, key)}]
    else:
        completion = messages_of(number, record, side, key)
    if completion[-1]["role"] != "assistant":
        raise BadInput(f"{where(number, side, key)} must be a string, or messages that end with one of role assistant")
    ids, mask = encode_chat(tokenizer, [*prompt, *completion], where(number, side, key))
    before = len(encode_prompt(tokenizer, prompt, where(number, "prompt", key)))
    return Tokens(ids, [0] * before + mask[before:])  # what the assistant said in the prompt is no part of the choice
