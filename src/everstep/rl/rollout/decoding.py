"""Continuous batching over a transformers model: sequences enter and leave a running batch between two tokens.

    decoder.add([...])                 they wait until there is room
    decoder.advance(32)                up to 32 tokens for each running sequence; returns what was made

Keys and values of the running rows lie in one cache, padded on the left; a row that is done is taken out, and those that enter are put
beside the others. Sequences with the same beginning (the samples of one prompt) are prefilled once. Because work is done in short calls,
whoever calls always knows what each sequence has so far, can give it to another decoder to go on with, and can change the weights in
between (``restart``).

Legend: B running rows, T columns of the cache, V vocabulary.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from everstep.rl.rollout import Pieces, Response, Sampling
from everstep.rl.rollout.noise import draw, sample_keys

#: Running rows are joined by waiting ones when this share of the places is free: each entry costs a prefill and a copy of the cache.
_ENTRY_SHARE = 0.25


@dataclass
class Pending:
    """A sequence to be completed. ``made``: what it has already, from an attempt before; its tokens count towards the greatest length."""

    sample_id: str
    prompt: list[int]
    made: Response = field(default_factory=Response)


class Decoder:
    """Not thread-safe. ``version()``: the committed step of the model's weights, asked for each token that is made; ``text(tokens)``:
    of a completion."""

    def __init__(
        self, model: Any, eos: Collection[int], pad: int, device: torch.device, version: Callable[[], int],
        text: Callable[[list[int]], str],
    ):
        self._model, self._pad, self._device, self._version, self._text = model, pad, device, version, text
        # `past_key_values` until transformers 5.23, which still knows it but warns.
        self._cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._eos = torch.tensor(sorted(eos), device=device)
        self._waiting: list[Pending] = []
        self._rows: list[Pending] = []
        self._cache: Any = DynamicCache()  # its layers are those of plain attention
        # Of the running rows: which columns of the cache are real (B, T), logits of the next token (B, V), streams of noise (B,).
        self._mask = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self._logits = torch.zeros(0, 0, device=device)
        self._keys = torch.zeros(0, dtype=torch.int64, device=device)
        self._sampling = Sampling()

    def __len__(self) -> int:
        """Sequences that are not complete."""
        return len(self._rows) + len(self._waiting)

    def add(self, sequences: Sequence[Pending], sampling: Sampling) -> None:
        """All sequences of a decoder are sampled alike: ``sampling`` may only change when it is empty."""
        if len(self) and sampling != self._sampling:
            raise ValueError("sequences that are sampled otherwise are still being decoded")
        self._sampling = sampling
        self._waiting += sequences

    def cancel(self, sample_ids: Collection[str]) -> None:
        self._waiting = [s for s in self._waiting if s.sample_id not in sample_ids]
        self._keep([row for row, s in enumerate(self._rows) if s.sample_id not in sample_ids])

    def restart(self) -> None:
        """The weights have changed: what runs goes on from the tokens it has, with keys and values made anew."""
        self._waiting = self._rows + self._waiting
        self._keep([])

    @torch.no_grad()
    def advance(self, tokens: int) -> Pieces:
        """Up to ``tokens`` tokens for each running sequence; what each gained, by sample id, and whether it is complete."""
        start, gained = time.monotonic(), dict[str, Response]()
        complete: set[str] = set()
        for _ in range(tokens):
            self._enter()
            if not self._rows:
                break
            complete |= self._one_token(gained)
        seconds = (time.monotonic() - start) / max(len(gained), 1)
        for response in gained.values():
            response.seconds = seconds
        return {sample: (response, sample in complete) for sample, response in gained.items()}

    # -- parts ---------------------------------------------------------------------------------------------------------------

    def _one_token(self, gained: dict[str, Response]) -> set[str]:
        limit = self._sampling.max_response_tokens
        steps = torch.tensor([len(s.made.tokens) for s in self._rows], device=self._device)
        token, logprob = draw(self._logits, self._sampling, self._keys, steps)
        ended = torch.isin(token, self._eos)
        version, done = self._version(), set[str]()
        for sequence, t, p, end in zip(self._rows, token.tolist(), logprob.tolist(), ended.tolist(), strict=True):
            piece = Response([t], [p], [version], finished=end)
            gained.setdefault(sequence.sample_id, Response()).extend(piece)
            sequence.made.extend(piece)
            if end or len(sequence.made.tokens) >= limit:
                done.add(sequence.sample_id)
                sequence.made.text = gained[sequence.sample_id].text = self._text(sequence.made.tokens)
        stay = [row for row, s in enumerate(self._rows) if s.sample_id not in done]
        token = token[stay]
        if done:
            self._keep(stay)
        if stay:
            ones = torch.ones(len(stay), 1, dtype=torch.int64, device=self._device)
            self._mask = torch.cat([self._mask, ones], dim=1)
            self._logits = self._forward(token.unsqueeze(1), self._mask, self._mask.sum(dim=1, keepdim=True) - 1, self._cache)
        return done

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        held = {self._cache_argument: cache}
        out = self._model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1, **held)
        logits: Tensor = out.logits[:, -1]
        return logits

    def _enter(self) -> None:
        """Waiting sequences take free places."""
        size = self._sampling.samples_per_batch
        free = size - len(self._rows)
        if not self._waiting or (self._rows and free < _ENTRY_SHARE * size):
            return
        entering, self._waiting = self._waiting[:free], self._waiting[free:]
        texts = [tuple(s.prompt + s.made.tokens) for s in entering]
        different = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        width = max(map(len, different))
        ids = torch.tensor([[self._pad] * (width - len(text)) + list(text) for text in different], device=self._device)
        mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in different], device=self._device)
        cache = DynamicCache()
        logits = self._forward(ids, mask, (mask.cumsum(dim=1) - 1).clamp(min=0), cache)
        copies = torch.tensor([different[text] for text in texts], device=self._device)
        cache.batch_select_indices(copies)
        self._join(entering, cache, mask[copies], logits[copies])

    def _join(self, entering: list[Pending], cache: Any, mask: Tensor, logits: Tensor) -> None:
        """Put rows beside the running ones; the narrower cache gets more padding on its left."""
        keys = sample_keys(self._sampling.seed, [s.sample_id for s in entering]).to(self._device)
        if not self._rows:
            self._rows, self._cache, self._mask, self._logits, self._keys = entering, cache, mask, logits, keys
            return
        here, there = self._mask.shape[1], mask.shape[1]
        width = max(here, there)
        for mine, theirs in zip(self._cache.layers, cache.layers, strict=True):
            mine.keys = torch.cat([_widen(mine.keys, width), _widen(theirs.keys, width)])
            mine.values = torch.cat([_widen(mine.values, width), _widen(theirs.values, width)])
        self._mask = torch.cat([F.pad(self._mask, (width - here, 0)), F.pad(mask, (width - there, 0))])
        self._logits, self._keys = torch.cat([self._logits, logits]), torch.cat([self._keys, keys])
        self._rows = self._rows + entering

    def _keep(self, rows: list[int]) -> None:
        """Only these rows go on; columns that are padding in all of them go too."""
        self._rows = [self._rows[row] for row in rows]
        if not rows:
            self._cache = DynamicCache()
        index = torch.tensor(rows, dtype=torch.int64, device=self._device)
        self._mask, self._logits, self._keys = self._mask[index], self._logits[index], self._keys[index]
        if not rows:
            return
        first = int(self._mask.any(dim=0).int().argmax())
        self._mask = self._mask[:, first:]
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[index, :, first:], layer.values[index, :, first:]


def _widen(cached: Tensor, width: int) -> Tensor:
    """(B, heads, T, head size) -> (B, heads, width, head size)."""
    return F.pad(cached, (0, 0, width - cached.shape[2], 0))
