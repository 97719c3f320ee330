"""Data: sources of records, tokenization, and the order in which samples are used.

``check(config)`` reads and tokenizes everything a run needs, so that whatever is wrong with the data is said before any
process is started.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from everstep.data.order import SampleRef, SampleStream, pass_order
from everstep.data.source import REASONING_GYM, load_records, with_columns
from everstep.errors import BadInput, ConfigError

if TYPE_CHECKING:
    from everstep.config.schema import Config
    from everstep.data.prepare import Dataset, Dropped, Tokens, encode_chat, encode_prompt, prepare_prompts, prepare_sft

__all__ = [
    "Dataset",
    "Dropped",
    "PreparedData",
    "SampleRef",
    "SampleStream",
    "Tokens",
    "check",
    "encode_chat",
    "encode_prompt",
    "load_records",
    "pass_order",
    "prepare_prompts",
    "prepare_sft",
]


_IN_PREPARE = {"Dataset", "Dropped", "Tokens", "encode_chat", "encode_prompt", "prepare_prompts", "prepare_sft"}


def __getattr__(name: str) -> Any:
    # `prepare` imports torch; `everstep plan` needs only the functions that the configuration names.
    if name in _IN_PREPARE:
        from everstep.data import prepare

        return getattr(prepare, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(frozen=True)
class PreparedData:
    """All data of a run, tokenized. ``warmup`` only if the configuration asks for a warm-up, ``eval`` if for evaluation."""

    train: Dataset
    eval: Dataset | None
    warmup: Dataset | None
    tokenizer: Any

    def held_out_in_training(self) -> int:
        """How many of the held-out samples are, token by token, training samples too: what they say of the model is not how it generalises."""
        trained = {tuple(sample.input_ids) for sample in self.train.samples}
        return sum(tuple(sample.input_ids) in trained for sample in self.eval.samples) if self.eval else 0


def check(config: Config) -> PreparedData:
    """Load and tokenize the data of ``config`` and resolve its reward function.

    BadInput (one sentence, with the key and the record) if a source cannot be read, a record does not have what its
    format asks for or is too long, a token is outside the model's vocabulary, or the reward cannot be imported.
    Starts no process.
    """
    from everstep.config import derive
    from everstep.data.preferences import prepare_preferences
    from everstep.data.prepare import prepare_prompts, prepare_sft
    from everstep.engine.source import describe, load_tokenizer

    data, rl = config.data, derive.is_rl(config)
    if rl and data.format != "prompt":
        raise ConfigError(f"recipe={config.recipe} generates from prompts: set data.format=prompt (it is {data.format})")
    tokenizer = load_tokenizer(config.model)

    def prepare(spec: str, args: dict[str, Any], key: str, prompts: bool) -> Dataset:
        records = load_records(spec, args, key)
        if key.startswith("data."):
            records = with_columns(records, data.columns, key)
        if data.format == "preference":
            return prepare_preferences(records, tokenizer, data.max_tokens, data.too_long, key)
        if prompts:
            return prepare_prompts(records, tokenizer, data.max_prompt_tokens, data.too_long, key)
        format = None if key == "warmup.source" else data.format
        return prepare_sft(records, tokenizer, format, data.max_tokens, data.too_long, key)

    train = prepare(data.source, data.source_args, "data.source", rl)
    held_out = prepare(data.eval_source, data.eval_source_args, "data.eval_source", rl) if data.eval_source else None
    warmup = None
    if rl and config.warmup.steps:
        if not config.warmup.source:
            raise ConfigError(f"warmup.steps={config.warmup.steps} needs warmup.source; or set warmup.steps=0")
        warmup = prepare(config.warmup.source, config.warmup.source_args, "warmup.source", False)
    if rl:
        from everstep.rl.reward_functions import terms

        terms(config.reward, data.source, data.source_args)
        _check_scorer(config)

    vocabulary = describe(config.model).vocab
    for dataset in (train, held_out, warmup):
        _check_vocabulary(dataset, vocabulary)
    return PreparedData(train, held_out, warmup, tokenizer)


def _check_scorer(config: Config) -> None:
    """Held-out records are scored as those of training, by one function: the scorer of a reasoning_gym task knows its own alone."""
    data, reward = config.data, config.reward
    own = any(term.function is None for term in reward.terms) if reward.terms else reward.function is None
    if own and data.eval_source and data.eval_source.startswith(REASONING_GYM) and data.eval_source != data.source:
        raise ConfigError(
            f"data.eval_source={data.eval_source} would be scored by the scorer of data.source={data.source}; use one task for both, or set "
            "reward.function to one that can score both"
        )


def _check_vocabulary(dataset: Dataset | None, vocabulary: int) -> None:
    largest = max((max(s.input_ids) for s in dataset.samples), default=0) if dataset else 0
    if largest >= vocabulary:
        assert dataset is not None
        raise BadInput(
            f"{dataset.key}: the tokenizer makes token {largest}, but the model's vocabulary has {vocabulary}; "
            "model.tokenizer and model.path do not belong together"
        )
