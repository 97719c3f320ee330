"""Continuous batching over a transformers model: sequences enter and leave a running batch between two tokens.

    decoder.add([...])                 they wait until there is room
    decoder.advance(32)                up to 32 tokens for each running sequence; returns what was made

A row that is done is free for one that waits (:mod:`everstep.rl.rollout.slots`). Sequences with the same beginning (the samples of one
prompt) are prefilled once. Because work is done in short calls, whoever calls always knows what each sequence has so far, can give it to
another decoder to go on with, and can change the weights in between (``restart``).

Legend: B running rows, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from everstep.rl.rollout import Pieces, Response, Sampling
from everstep.rl.rollout.noise import draw, sample_keys
from everstep.rl.rollout.slots import Slots

#: Running rows are joined by waiting ones when this share of the places is free: each entry costs a prefill.
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
        self, slots: Slots, eos: Collection[int], device: torch.device, version: Callable[[], int], text: Callable[[list[int]], str],
    ):
        self._slots, self._device, self._version, self._text = slots, device, version, text
        self._eos = torch.tensor(sorted(eos), device=device)
        self._waiting: list[Pending] = []
        self._rows: list[Pending] = []
        # Of the running rows: logits of the next token (B, V), its number in the completion (B,), streams of noise (B,).
        self._logits = torch.zeros(0, 0, device=device)
        self._numbers = self._keys = torch.zeros(0, dtype=torch.int64, device=device)
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
        self._leave([row for row, s in enumerate(self._rows) if s.sample_id in sample_ids])

    def restart(self) -> None:
        """The weights have changed: what runs goes on from the tokens it has, with keys and values made anew."""
        self._waiting = self._rows + self._waiting
        self._leave(range(len(self._rows)))

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
        """The device is given the pass over the token that was drawn before the host looks at what that is: they work side by side. Rows that
        turn out to be complete have gone through it for nothing."""
        limit = self._sampling.max_response_tokens
        token, logprob = draw(self._logits, self._sampling, self._keys, self._numbers)
        drawn = _OnItsWay(token, logprob, torch.isin(token, self._eos))
        if any(len(s.made.tokens) + 1 < limit for s in self._rows):
            self._logits = self._slots.advance(token)
        self._numbers = self._numbers + 1
        version, leave = self._version(), list[int]()
        for row, (sequence, (t, p, end)) in enumerate(zip(self._rows, drawn.rows(), strict=True)):
            piece = Response([int(t)], [p], [version], finished=bool(end))
            gained.setdefault(sequence.sample_id, Response()).extend(piece)
            sequence.made.extend(piece)
            if end or len(sequence.made.tokens) >= limit:
                leave.append(row)
                sequence.made.text = gained[sequence.sample_id].text = self._text(sequence.made.tokens)
        done = {self._rows[row].sample_id for row in leave}
        if leave:
            self._leave(leave)
        if self._slots.doubtful():
            self.restart()
        return done

    def _enter(self) -> None:
        """Waiting sequences take free places."""
        size = self._sampling.samples_per_batch
        free = size - len(self._rows)
        if not self._waiting or (self._rows and free < _ENTRY_SHARE * size):
            return
        entering, self._waiting = self._waiting[:free], self._waiting[free:]
        longest = max(len(s.prompt) for s in entering) + self._sampling.max_response_tokens
        logits = self._slots.enter([(*s.prompt, *s.made.tokens) for s in entering], longest)
        keys = sample_keys(self._sampling.seed, [s.sample_id for s in entering]).to(self._device)
        self._logits = torch.cat([self._logits, logits]) if self._rows else logits
        self._keys = torch.cat([self._keys, keys])
        self._numbers = torch.cat([self._numbers, torch.tensor([len(s.made.tokens) for s in entering], device=self._device)])
        self._rows = self._rows + entering

    def _leave(self, rows: Sequence[int]) -> None:
        """These rows are free."""
        order = self._slots.remove(rows)
        self._rows = [self._rows[row] for row in order]
        index = torch.tensor(order, dtype=torch.int64, device=self._device)
        self._logits, self._keys, self._numbers = self._logits[index], self._keys[index], self._numbers[index]


class _OnItsWay:
    """Vectors of equal length that are copied to the host while the device does what it is given next. float64 holds tokens and float32
    exactly."""

    def __init__(self, *vectors: Tensor):
        there = torch.stack([vector.double() for vector in vectors], dim=1)
        self._copied: torch.cuda.Event | None = None
        self._here = there
        if there.is_cuda:
            self._here = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
            self._here.copy_(there, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def rows(self) -> list[list[float]]:
        """Waits for the copy."""
        if self._copied:
            self._copied.synchronize()
        rows: list[list[float]] = self._here.tolist()
        return rows
