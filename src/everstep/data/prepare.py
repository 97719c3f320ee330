"""From records to tokens: chat templates, loss masks, length limits.

    format  a record holds                                   tokens that count in the loss
    chat    messages: [{role, content}, ...]                 what the assistant wrote, end-of-turn included
    text    text: str                                        all of them
    prompt  prompt: str or messages; completion: str (SFT)   the completion and the end-of-sequence token
            prompt; answer and whatever the reward needs     none: the model writes the completion (RL)

A prompt given as a string is tokenized as it stands; one given as messages goes through the chat template. Errors name
the record by its number (from 0, in the order of the source) and by its key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from everstep.cluster.batch import TrainingBatch
from everstep.data.order import SampleRef
from everstep.data.source import Record
from everstep.errors import BadInput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Format = Literal["chat", "text", "prompt"]
TooLong = Literal["error", "drop", "truncate_left", "truncate_right"]


@dataclass(frozen=True)
class Tokens:
    """One tokenized record. ``loss_mask`` has one 0 or 1 per token; the first is 0, as nothing predicts it."""

    input_ids: list[int]
    loss_mask: list[int]
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Dropped:
    """A record that is not used, and why."""

    record: int
    reason: str


@dataclass(frozen=True)
class Dataset:
    """Tokenized records that fit, and a list of those that do not. ``key`` is the configuration key of the source."""

    key: str
    samples: list[Tokens]
    dropped: list[Dropped] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return max((len(s.input_ids) for s in self.samples), default=0)

    def batch(self, refs: Sequence[SampleRef]) -> TrainingBatch:
        """The samples in this order, right-padded to the longest of them.

        Tensors ``input_ids`` and ``attention_mask`` int64 (B, T), ``loss_mask`` float32 (B, T); columns as the samples
        have them.
        """
        chosen = [self.samples[ref.index] for ref in refs]
        width = max((len(s.input_ids) for s in chosen), default=1)
        pad = lambda values: values + [0] * (width - len(values))
        shape = (len(chosen), width)
        names = list(chosen[0].columns) if chosen else []
        return TrainingBatch(
            tensors={
                "input_ids": torch.tensor([pad(s.input_ids) for s in chosen], dtype=torch.int64).reshape(shape),
                "attention_mask": torch.tensor([pad([1] * len(s.input_ids)) for s in chosen], dtype=torch.int64).reshape(shape),
                "loss_mask": torch.tensor([pad(s.loss_mask) for s in chosen], dtype=torch.float32).reshape(shape),
            },
            columns={name: [s.columns[name] for s in chosen] for name in names},
            sample_ids=[ref.id for ref in refs],
        )

    def first(self, count: int) -> TrainingBatch:
        """The first ``count`` samples (fewer if there are not so many), with the ids ``KEY/index``: for evaluation."""
        return self.batch([SampleRef(f"{self.key}/{i}", i) for i in range(min(count, len(self)))])


# ------------------------------------------------------------------------------------------------ supervised


def prepare_sft(
    records: list[Record],
    tokenizer: PreTrainedTokenizerBase,
    format: Format | None,
    max_tokens: int,
    too_long: TooLong,
    key: str = "data.source",
) -> Dataset:
    """Training sequences with the loss mask of the table above. ``format`` None: each record's keys tell.

    ``too_long`` says what becomes of longer ones. BadInput for a record that lacks its key, or has nothing to learn from.
    """

    def encode(number: int, record: Record) -> Tokens:
        kind = format or _format_of(number, record, key)
        if kind == "chat":
            ids, mask = encode_chat(tokenizer, messages_of(number, record, "messages", key), where(number, "messages", key))
        elif kind == "text":
            ids = list(tokenizer(string_of(number, record, "text", key))["input_ids"])
            if not ids or ids[-1] != tokenizer.eos_token_id:
                ids.append(_eos(tokenizer, key))
            mask = [1] * len(ids)
        else:
            prompt = encode_prompt(tokenizer, prompt_of(number, record, key), where(number, "prompt", key))
            text = string_of(number, record, "completion", key)
            completion = [*tokenizer(text, add_special_tokens=False)["input_ids"], _eos(tokenizer, key)]
            ids, mask = prompt + completion, [0] * len(prompt) + [1] * len(completion)
        return Tokens(ids, mask)

    return _fit(records, encode, max_tokens, too_long, key, "data.max_tokens", needs_target=True)


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], where: str) -> tuple[list[int], list[int]]:
    """Token ids of a conversation and a mask of what the assistant wrote, end-of-turn token included.

    A template that marks the assistant's words itself (``{% generation %}``) is taken at its word. Otherwise the
    conversation is rendered as text, each assistant turn is located in it by rendering the messages before it, and the
    characters of the turn are mapped to tokens. A token that straddles the boundary of a turn does not count: the model
    would never be asked to write it. ``where`` begins the error message (BadInput).
    """
    if not any(m["role"] == "assistant" for m in messages):
        raise BadInput(f"{where} has no message of role assistant; there is nothing to learn from it")
    template = _template(tokenizer, where)
    if re.search(r"{%-?\s*generation\s*-?%}", template):
        encoded: Any = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = list(encoded["input_ids"]), list(encoded["assistant_masks"])
        if not any(mask):
            raise BadInput(f"{where}: the chat template marks nothing as written by the assistant")
        return ids, mask
    text = _render(tokenizer, messages, False, where)
    spans = _assistant_spans(tokenizer, messages, text, where)
    try:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    except NotImplementedError as error:
        raise BadInput(
            f"{where}: this tokenizer cannot tell which characters a token covers; mark the assistant's words in its chat "
            "template with {% generation %}"
        ) from error
    inside = lambda a, b: any(start <= a and b <= end for start, end in spans)
    mask = [int(a < b and inside(a, b)) for a, b in encoded["offset_mapping"]]
    return list(encoded["input_ids"]), mask


def _assistant_spans(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], text: str, where: str
) -> list[tuple[int, int]]:
    """Character ranges [start, end) of the assistant's turns in the rendered conversation."""
    special = "|".join(re.escape(t) for t in sorted(set(tokenizer.all_special_tokens), key=len, reverse=True))
    end_of_turn = re.compile(rf"\s*(?:{special})") if special else None
    spans: list[tuple[int, int]] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        # Some templates drop the reasoning of earlier turns.
        content = message["content"].strip()
        if i < len(messages) - 1 and content not in text:
            content = content.rpartition("</think>")[2].strip()
        before = _render(tokenizer, messages[:i], True, where) if i else ""
        start = len(before) if before and text.startswith(before) else (spans[-1][1] if spans else 0)
        found = text.find(content, start)
        if found < 0:
            raise BadInput(
                f"{where}: message {i} cannot be found in the rendered conversation, as the chat template changes it; "
                "mark the assistant's words in the template with {% generation %}"
            )
        if not (before and text.startswith(before)):
            start = found
        end = found + len(content)
        closing = end_of_turn.match(text, end) if end_of_turn else None
        spans.append((start, closing.end() if closing else end))
    return spans


# ------------------------------------------------------------------------------------------------ prompts


def prepare_prompts(
    records: list[Record],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    too_long: TooLong,
    key: str = "data.source",
) -> Dataset:
    """Prompts for generation, ending where the completion begins. Columns: ``prompt`` (the text the model sees, without
    special tokens; what is cut off is not in it) and ``record`` (the whole record, for the reward function)."""

    def encode(number: int, record: Record) -> Tokens:
        ids = encode_prompt(tokenizer, prompt_of(number, record, key), where(number, "prompt", key))
        if not ids:
            raise BadInput(f"{where(number, 'prompt', key)} is empty: generation needs at least one token to start from")
        return Tokens(ids, [0] * len(ids), {"record": record})

    found = _fit(records, encode, max_prompt_tokens, too_long, key, "data.max_prompt_tokens", needs_target=False)
    # What was cut off, the model does not see, and a reward function shall not either.
    text = lambda sample: tokenizer.decode(sample.input_ids, skip_special_tokens=True)
    return replace(found, samples=[replace(s, columns={"prompt": text(s), **s.columns}) for s in found.samples])


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, Any]], where: str) -> list[int]:
    """Token ids of a prompt: a string as it stands, messages through the chat template with the assistant's turn opened."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    text = _render(tokenizer, prompt, True, where)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


# ------------------------------------------------------------------------------------------------ shared


def _fit(
    records: list[Record],
    encode: Callable[[int, Record], Tokens],
    limit: int,
    too_long: TooLong,
    key: str,
    limit_key: str,
    needs_target: bool,
) -> Dataset:
    samples: list[Tokens] = []
    dropped: list[Dropped] = []
    excess: list[tuple[int, int]] = []
    for number, record in enumerate(records):
        tokens = encode(number, record)
        length = len(tokens.input_ids)
        if length > limit:
            excess.append((number, length))
            if too_long == "drop":
                dropped.append(Dropped(number, f"{length} tokens, {limit_key}={limit}"))
            if too_long in ("error", "drop"):
                continue
            part = slice(-limit, None) if too_long == "truncate_left" else slice(limit)
            tokens = Tokens(tokens.input_ids[part], tokens.loss_mask[part], tokens.columns)
        mask = [0, *tokens.loss_mask[1:]]
        if needs_target and not any(mask):
            dropped.append(Dropped(number, "no token to learn from"))
            continue
        samples.append(Tokens(tokens.input_ids, mask, tokens.columns))
    if excess and too_long == "error":
        raise too_long_error(excess, limit, key, limit_key)
    if not samples:
        raise BadInput(f"{key}: none of {len(records)} records can be used (record 0: {dropped[0].reason})")
    return Dataset(key, samples, dropped)


def too_long_error(excess: list[tuple[int, int]], limit: int, key: str, limit_key: str) -> BadInput:
    """``excess``: (record, tokens) of each that is too long; the longest is named, as that is what the limit would have to be."""
    number, length = max(excess, key=lambda item: item[1])
    more = f", and {len(excess) - 1} more records are too long" if len(excess) > 1 else ""
    return BadInput(
        f"{key}: record {number} has {length} tokens, more than {limit_key}={limit}{more}; raise {limit_key}, "
        "or set data.too_long=drop, truncate_left or truncate_right"
    )


def _format_of(number: int, record: Record, key: str) -> Format:
    for name, kind in (("messages", "chat"), ("completion", "prompt"), ("text", "text")):
        if name in record:
            return kind  # type: ignore[return-value]
    raise BadInput(f"{key}: record {number} has neither messages, prompt and completion, nor text; it has {sorted(record)}")


def where(number: int, name: str, key: str) -> str:
    """How an error names a field of a record."""
    return f"{key}: {name!r} of record {number}"


def _get(number: int, record: Record, name: str, key: str) -> Any:
    if record.get(name) is None:
        raise BadInput(f"{key}: record {number} has no {name!r}; it has {sorted(record)} (see data.format)")
    return record[name]


def string_of(number: int, record: Record, name: str, key: str) -> str:
    """A field that must be a string. BadInput."""
    value = _get(number, record, name, key)
    if not isinstance(value, str):
        raise BadInput(f"{where(number, name, key)} is a {type(value).__name__}, not a string")
    return _text(value, where(number, name, key))


def _text(value: str, place: str) -> str:
    """BadInput for half a surrogate pair, as JSON may hold (an emoji that was cut): Python has it, but no tokenizer takes it."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadInput(f"{place} is no text: character {error.start} is {value[error.start]!a}, half of a pair; mend the record, or leave it out") from None
    return value


def messages_of(number: int, record: Record, name: str, key: str) -> list[dict[str, Any]]:
    """A field that must hold messages, each with a role and a content. BadInput."""
    place = where(number, name, key)
    value = _get(number, record, name, key)
    if not isinstance(value, list) or not value:
        raise BadInput(f"{place} must be a non-empty list of {{role, content}}")
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadInput(f"{place}: message {i} has no role")
        if not isinstance(message.get("content"), str):
            raise BadInput(f"{place}: message {i} has no content of type string")
        _text(message["content"], f"{place}: message {i}")
    # Parquet gives every message of a column the same keys, absent ones as None.
    return [{k: v for k, v in message.items() if v is not None} for message in value]


def prompt_of(number: int, record: Record, key: str) -> str | list[dict[str, Any]]:
    """The field ``prompt``: a string or messages. BadInput."""
    value = _get(number, record, "prompt", key)
    return string_of(number, record, "prompt", key) if isinstance(value, str) else messages_of(number, record, "prompt", key)


def _template(tokenizer: PreTrainedTokenizerBase, where: str) -> str:
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        raise BadInput(
            f"{where}: the tokenizer has no chat template; choose one that has (model.tokenizer), or give strings instead "
            "of messages"
        ) from error


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], open_turn: bool, where: str) -> str:
    from jinja2 import TemplateError

    _template(tokenizer, where)
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=open_turn))
    except TemplateError as error:
        raise BadInput(f"{where}: the chat template refuses it: {error}") from error


def _eos(tokenizer: PreTrainedTokenizerBase, key: str) -> int:
    if tokenizer.eos_token_id is None:
        raise BadInput(f"{key}: the tokenizer has no end-of-sequence token, so the model could never learn to stop")
    return tokenizer.eos_token_id
