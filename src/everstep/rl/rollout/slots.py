"""Keys and values of sequences that are being decoded, in places that do not move, so that one token for all is one launch on a GPU.

    slots = Slots(model, device, pad)
    logits = slots.enter(sequences, longest)   they are prefilled, behind those that are there; the logits of their next tokens
    logits = slots.advance(tokens)             each sequence's next token goes in; the logits of the one after it come out
    slots.remove([0, 5])                       these rows are free; the last ones move into their places

A row holds a sequence from column 0 on, whatever the length of its neighbours: nothing is padded on the left, and nothing is copied for a
new token but the token. Free rows and the columns behind a sequence's end hold what was there before, which the mask hides. Attention to
a row's one new token reads its keys and values once for all query heads that share them (:func:`grouped_attention`).

On a GPU the forward pass of a token is a captured CUDA graph for each pair of (rows, columns), both rounded up: a small model's kernels take
less time than Python takes to launch them (37 ms a token for the 30 layers of SmolLM2 on an H200, however few the rows). ``advance`` waits
for nothing on the device, unless buffers grow: what follows on the host goes on beside it.

Legend: B running rows, C columns that the buffers have, H key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from everstep.errors import first_line
from everstep.rl.rollout.served import expert_count

LOG = logging.getLogger(__name__)

#: Columns come by as many. The fewest, where sequences may need them; they are doubled when they are full: what is there is copied, and on a GPU
#: graphs are captured anew.
_COLUMNS, _FEWEST = 128, 512

#: Tokens, padding included, that one pass prefills, unless a single sequence has more. Long prompts, and what runs on under new weights or comes
#: from an engine that died, would otherwise need memory for activations many times that of generating.
_PREFILLED = 32_768

#: Passes before a capture: libraries make their workspaces in the first ones.
_WARM_UP = 2

#: A captured pass may run other kernels: its logits may differ from those of a pass that is not by so many roundings of the largest one.
#: (In bfloat16, 2% were seen with SmolLM2's shape; values of another token differ by about all.)
_ROUNDINGS = 8

_GROUPED = "everstep_grouped"


def grouped_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None, **more: Any
) -> tuple[Tensor, None]:
    """``query`` (B, Q, T, D) to ``key``, ``value`` (B, H, C, D), as transformers calls it; (B, T, Q, D).

    With one token (T = 1), the Q / H query heads of a key/value head are taken for as many tokens: PyTorch's attention, given a mask, would
    otherwise be given a copy of keys and values for each of them.
    """
    heads, tokens = query.shape[1:3]
    if tokens > 1 or heads == key.shape[1] or attention_mask is None or attention_mask.shape[1] > 1:
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **more)
        return out, None
    grouped = query.reshape(len(query), key.shape[1], -1, query.shape[3])
    out = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(len(query), 1, heads, -1), None


AttentionInterface.register(_GROUPED, grouped_attention)
AttentionMaskInterface.register(_GROUPED, sdpa_mask)


class Slots:
    """``pad``: a token for where no sequence is. ``graphs``: capture CUDA graphs, on a GPU. Not thread-safe."""

    def __init__(self, model: Any, device: torch.device, pad: int, graphs: bool = True):
        self._model, self._device, self._pad = model, device, pad
        if model.config._attn_implementation == "sdpa":  # else it has attention of another kind
            model.set_attn_implementation(_GROUPED)
        # `past_key_values` until transformers 5.23, which still knows it but warns.
        self._cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        # Experts are called by what the router says, on the host.
        self._graphs: _Graphs | None = _Graphs() if graphs and device.type == "cuda" and not expert_count(model) else None
        self._doubtful = False
        self._lengths: list[int] = []  # of the running rows
        self._size = self._capacity = self._longest = 0  # rows and columns of the buffers; the most columns that can be needed
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._view = (0, 0)  # rows and columns that the pass under way is over
        # Of all rows: their numbers, what goes in next, and into which column; of all columns: their numbers.
        self._rows = self._tokens = self._positions = self._columns = torch.zeros(0, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._lengths)

    def enter(self, sequences: Sequence[tuple[int, ...]], longest: int) -> Tensor:
        """Sequences of tokens, behind those that are there; equal ones are prefilled once. The logits of their next tokens (n, V). None
        gets longer than ``longest`` tokens."""
        return torch.cat([self._prefill(some, longest) for some in _at_a_time(sequences)])

    def _prefill(self, sequences: Sequence[tuple[int, ...]], longest: int) -> Tensor:
        different = {sequence: row for row, sequence in enumerate(dict.fromkeys(sequences))}
        width = max(map(len, different))
        ids = torch.tensor([[self._pad] * (width - len(s)) + list(s) for s in different], device=self._device)
        mask = torch.tensor([[0] * (width - len(s)) + [1] * len(s) for s in different], device=self._device)
        cache: Any = DynamicCache()  # its layers are those of plain attention
        logits = self._forward(ids, mask, (mask.cumsum(dim=1) - 1).clamp(min=0), cache)

        first = len(self)
        self._lengths += map(len, sequences)
        self._longest = max(self._longest, longest)
        self._layers = self._layers or [(layer.keys[:0, :, :0], layer.values[:0, :, :0]) for layer in cache.layers]
        self._reserve()
        self._positions[first : len(self)] = torch.tensor(self._lengths[first:], device=self._device)
        rows = torch.tensor([different[s] for s in sequences], device=self._device)
        padding = torch.tensor([width - len(s) for s in sequences], device=self._device).unsqueeze(1)
        columns = (torch.arange(width, device=self._device) + padding).clamp(max=width - 1)
        for layer, (keys, values) in zip(cache.layers, self._layers, strict=True):
            for held, given in ((keys, layer.keys), (values, layer.values)):
                held[first : len(self), :, :width] = given[rows[:, None], :, columns].transpose(1, 2)
        return logits[rows]

    def advance(self, tokens: Tensor) -> Tensor:
        """``tokens`` (B,): the next ones. The logits of those after them (B, V), which are overwritten by the next call."""
        rows = len(self)
        self._reserve()
        self._tokens[:rows, 0] = tokens
        self._lengths = [length + 1 for length in self._lengths]
        if self._graphs is None:
            logits = self._pass(rows, max(self._lengths))
        else:
            # Rows that are free write into their own first column, which nobody reads before it is written anew.
            padded = _power_of_two(rows)
            self._positions[rows:padded] = 0
            refused = self._graphs.refused
            logits = self._graphs.run(padded, lambda: self._pass(padded, self._capacity), lambda: self._spoil(padded))[:rows]
            self._doubtful |= self._graphs.refused != refused
        self._positions[:rows] += 1
        return logits

    def remove(self, rows: Sequence[int]) -> list[int]:
        """These rows are done. Returns where each row that stays was before, in the order in which they are now."""
        gone, order = set(rows), list(range(len(self)))
        stay = len(order) - len(gone)
        holes = [row for row in sorted(gone) if row < stay]
        movers = [row for row in order[stay:] if row not in gone]
        if holes:
            source, target = (torch.tensor(index, device=self._device) for index in (movers, holes))
            longest = max(self._lengths[row] for row in movers)
            for layer in self._layers:
                for held in layer:
                    held[target, :, :longest] = held[source, :, :longest]
            self._positions[target] = self._positions[source]
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        self._lengths = [self._lengths[row] for row in order[:stay]]
        return order[:stay]

    def doubtful(self) -> bool:
        """Whether keys, values and the logits of the last ``advance`` may be wrong, because a captured pass turned out not to do what it should:
        all sequences must enter anew. Told once."""
        doubtful, self._doubtful = self._doubtful, False
        return doubtful

    def release(self) -> None:
        """Give back the memory; what was running is lost. The model's weights may be elsewhere afterwards."""
        self._lengths = []
        self._free()

    # -- the cache as a transformers model sees it, while it makes one token for each row ------------------------------------

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the token's ``keys`` and ``values`` (B, H, 1, D) of a layer; all of that layer (B, H, C, D)."""
        rows, columns = self._view
        held = self._layers[layer]
        for buffer, given in zip(held, (keys, values), strict=True):
            buffer[self._rows[:rows], :, self._positions[:rows]] = given.squeeze(2)
        return held[0][:rows, :, :columns], held[1][:rows, :, :columns]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._view[1] - 1

    # -- parts ---------------------------------------------------------------------------------------------------------------

    def _pass(self, rows: int, columns: int) -> Tensor:
        self._view = rows, columns
        positions = self._positions[:rows].unsqueeze(1)
        hidden = self._columns[:columns] > positions
        mask = torch.zeros(rows, columns, dtype=self._model.dtype, device=self._device).masked_fill_(hidden, float("-inf"))
        return self._forward(self._tokens[:rows], mask[:, None, None], positions, self)

    def _spoil(self, rows: int) -> Callable[[], bool]:
        """Put NaN where the token's keys and values belong; what is returned tells whether a pass has written them anew."""
        places = [(held, self._rows[:rows], self._positions[:rows].clone()) for layer in self._layers for held in layer]
        for held, row, column in places:
            held[row, :, column] = float("nan")
        return lambda: all(bool(held[row, :, column].isfinite().all()) for held, row, column in places)

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:
        held = {self._cache_argument: cache}
        out = self._model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1, **held)
        logits: Tensor = out.logits[:, -1]
        return logits

    def _free(self) -> None:
        self._size = self._capacity = self._longest = 0
        self._layers = []
        self._positions = self._positions[:0]
        if self._graphs:
            self._graphs.clear()

    def _reserve(self) -> None:
        """Room for the rows of now, and for one more token in each."""
        rows, columns = len(self), max(self._lengths) + 1
        if rows > self._size:
            self._size = _power_of_two(rows)
            self._rows = torch.arange(self._size, device=self._device)
            self._tokens = torch.zeros(self._size, 1, dtype=torch.int64, device=self._device)
            positions, self._positions = self._positions, torch.zeros(self._size, dtype=torch.int64, device=self._device)
            self._positions[: len(positions)] = positions
            self._grow(max(columns, self._capacity))
        elif columns > self._capacity:
            self._grow(columns)

    def _grow(self, columns: int) -> None:
        """Buffers of ``_size`` rows and at least so many columns, with what there is."""
        self._capacity = max(columns, min(max(_FEWEST, _power_of_two(columns)), -(-self._longest // _COLUMNS) * _COLUMNS))
        self._columns = torch.arange(self._capacity, device=self._device)
        for index, layer in enumerate(self._layers):
            self._layers[index] = (self._wider(layer[0]), self._wider(layer[1]))
        if self._graphs:
            self._graphs.clear()

    def _wider(self, held: Tensor) -> Tensor:
        wide = held.new_zeros(self._size, held.shape[1], self._capacity, held.shape[3])  # not empty: 0 times a NaN would be one
        wide[: len(held), :, : held.shape[2]] = held
        return wide


@dataclass
class _Captured:
    """A pass of so many rows. ``unproved``: times that it is still compared with one that is not captured."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor
    unproved: int = 2


class _Graphs:
    """Passes that were captured, by their number of rows; all write their logits to memory of one pool.

    What cannot be captured, or says something else than the same pass does without (a model's code that depends on values), goes on
    without, and a warning says so.
    """

    def __init__(self) -> None:
        self.refused = False
        self.clear()

    def clear(self) -> None:
        self._captured: dict[int, _Captured] = {}
        self._pool: Any = None

    def run(self, rows: int, function: Callable[[], Tensor], spoil: Callable[[], Callable[[], bool]]) -> Tensor:
        """``function`` may be called more than once: each time it writes the same token to the same place. ``spoil``: make that place such
        that a pass which reads it without writing it is found; returns whether it was written since."""
        if not self.refused and rows not in self._captured:
            try:
                self._captured[rows] = self._capture(function)
            except RuntimeError as error:
                self._refuse(f"cannot be captured: {first_line(error)}")
        if self.refused:
            return function()
        captured = self._captured[rows]
        if not captured.unproved:
            captured.graph.replay()
            return captured.logits
        captured.unproved -= 1
        logits = function()
        written = spoil()
        captured.graph.replay()
        apart = (captured.logits.float() - logits.float()).abs().max()
        tolerance = max(1e-3, _ROUNDINGS * torch.finfo(logits.dtype).eps)
        if not written():
            self._refuse("writes keys and values to another place when it is captured")
        elif not apart <= tolerance * logits.float().abs().max():  # NaN: neither can be believed
            self._refuse(f"gives other logits when it is captured (by {float(apart):.2g})")
        return function() if self.refused else logits

    def _refuse(self, why: str) -> None:
        LOG.warning("rollout: the pass of a token %s; going on without CUDA graphs (rollout.cuda_graphs)", why)
        self.refused = True
        self.clear()

    def _capture(self, function: Callable[[], Tensor]) -> _Captured:
        before, side = torch.cuda.current_stream(), _capturing(torch.cuda.current_device())
        side.wait_stream(before)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                function()
        before.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            # Of this thread only: others of the process use the device, too (heartbeats, copies).
            with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                logits = function()
        except BaseException:  # torch leaves its stream the current one then, and the pool being filled: nothing could be freed any more
            torch.cuda.set_stream(before)
            with contextlib.suppress(RuntimeError, TypeError):  # it was ended after all, or is called otherwise in this torch
                torch._C._cuda_endAllocateToPool(before.device_index, self._pool)
            raise
        return _Captured(graph, logits)


@functools.cache
def _capturing(device: int) -> torch.cuda.Stream:
    """The stream on which passes are captured. Of another priority than any else of this process: torch has few streams of each, hands them out
    in turn, and what another thread does on a stream that is captured would be captured with it."""
    return torch.cuda.Stream(device, priority=-1)


def _at_a_time(sequences: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """All of ``sequences``, in their order."""
    some, different, width = list[tuple[int, ...]](), set[tuple[int, ...]](), 0
    for sequence in sequences:
        width = max(width, len(sequence))
        if some and len(different | {sequence}) * width > _PREFILLED:
            yield some
            some, different, width = [], set(), len(sequence)
        some.append(sequence)
        different.add(sequence)
    if some:
        yield some


def _power_of_two(count: int) -> int:
    """The smallest one that is not below ``count``."""
    return 1 << (count - 1).bit_length()
