"""TrainingBatch: what goes in comes out, in order, exactly once, with clear errors and cheap travel."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.cluster.batch import BatchError, TrainingBatch


def make(lengths: list[int], width: int | None = None, prefix: str = "0") -> TrainingBatch:
    """A batch with the given real tokens per sample, every value recognisable."""
    width = max([1, *lengths]) if width is None else width
    count = len(lengths)
    rows = [[int(t < n) for t in range(width)] for n in lengths]
    mask = torch.tensor(rows, dtype=torch.int64).reshape(count, width)
    ids = torch.arange(1, count * width + 1).reshape(count, width) * mask
    return TrainingBatch(
        tensors={
            "input_ids": ids,
            "attention_mask": mask,
            "loss_mask": mask.float(),
            "logprobs": torch.randn(count, width, dtype=torch.bfloat16),
            "reward": torch.arange(count, dtype=torch.float32),
        },
        columns={"record": [{"i": i, "who": prefix} for i in range(count)]},
        sample_ids=[f"{prefix}/{i}" for i in range(count)],
        weight_versions=list(range(count)),
    )


lengths = st.lists(st.integers(0, 7), max_size=12)


@given(lengths, st.integers(1, 15))
@settings(deadline=None)
def test_concat_undoes_chunk(counts: list[int], n: int) -> None:
    batch = make(counts)
    parts = batch.chunk(n)
    sizes = [len(part) for part in parts]
    assert len(parts) == n and sum(sizes) == len(batch)
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    assert TrainingBatch.concat(parts).equal(batch)


@given(st.lists(lengths, min_size=1, max_size=5))
@settings(deadline=None)
def test_concat_keeps_every_sample_once_and_pads_with_zeros(many: list[list[int]]) -> None:
    parts = [make(counts, prefix=str(k)) for k, counts in enumerate(many)]
    whole = TrainingBatch.concat(parts)
    assert whole.sample_ids == [sid for part in parts for sid in part.sample_ids]
    assert whole.weight_versions == [v for part in parts for v in part.weight_versions]
    assert whole.column("record") == [r for part in parts for r in part.column("record")]
    filled = [part for part in parts if len(part)]
    if filled:
        assert whole.width == max(part.width for part in filled)
    start = 0
    for part in filled:
        rows = whole.slice(start, start + len(part))
        for name, tensor in part.tensors.items():
            if tensor.dim() == 1:
                assert torch.equal(rows[name], tensor)
            else:
                assert torch.equal(rows[name][:, : part.width], tensor)
                assert not rows[name][:, part.width :].any(), "pad columns must be zero"
        start += len(part)


@given(lengths, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_select_by_permutation_and_back(counts: list[int], random) -> None:  # type: ignore[no-untyped-def]
    batch = make(counts)
    order = list(range(len(batch)))
    random.shuffle(order)
    back = [order.index(i) for i in range(len(order))]
    mixed = batch.select(order)
    assert sorted(mixed.sample_ids) == sorted(batch.sample_ids)
    assert mixed.select(back).equal(batch)


@given(lengths, st.integers(0, 9))
@settings(deadline=None)
def test_trim_undoes_padding(counts: list[int], extra: int) -> None:
    batch = make(counts)
    padded = batch.pad_to(batch.width + extra)
    assert padded.width == batch.width + extra
    if counts:
        trimmed = padded.trim()
        assert trimmed.width == max(1, *counts)
        assert trimmed.equal(batch.trim())
        assert trimmed.token_counts() == counts


@given(lengths)
@settings(deadline=None)
def test_pickle_round_trip_in_and_out_of_band(counts: list[int]) -> None:
    batch = make(counts)
    assert pickle.loads(pickle.dumps(batch)).equal(batch)
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    back = pickle.loads(head, buffers=[b.raw().tobytes() for b in buffers])
    assert back.equal(batch)
    assert back["logprobs"].dtype == torch.bfloat16


def test_out_of_band_pickle_shares_memory_and_a_slice_carries_only_itself() -> None:
    wide = TrainingBatch(
        tensors={"input_ids": torch.zeros(1000, 256, dtype=torch.int64)},
        sample_ids=[str(i) for i in range(1000)],
    )
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(wide, protocol=5, buffer_callback=buffers.append)
    assert len(head) < 20_000, "the tensor data must not be in the pickle stream"
    assert sum(b.raw().nbytes for b in buffers) == wide.nbytes == 1000 * 256 * 8
    back = pickle.loads(head, buffers=buffers)
    wide["input_ids"][3, 4] = 7
    assert back["input_ids"][3, 4] == 7, "out of band means the same memory"
    one = wide.slice(10, 11)
    assert len(pickle.dumps(one)) < 256 * 8 + 2000, "a slice must not drag the whole storage along"


def test_read_only_memory_is_accepted_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(make([2, 3]), protocol=5, buffer_callback=buffers.append)
    # bytes are read-only, like Ray's shared memory
    back = pickle.loads(head, buffers=[bytes(b.raw()) for b in buffers])
    copy = back.clone()
    copy["input_ids"][0, 0] = 99
    assert back["input_ids"][0, 0] == 1
    assert not [w for w in recwarn if "not writable" in str(w.message)]


def test_pickled_gradients_and_strides_do_not_matter() -> None:
    source = torch.arange(12.0).reshape(3, 4).t()  # not contiguous
    batch = TrainingBatch({"x": source.requires_grad_()}, sample_ids=list("abcd"))
    back = pickle.loads(pickle.dumps(batch))
    assert torch.equal(back["x"], source) and not back["x"].requires_grad


def test_repeat_makes_new_unique_ids() -> None:
    copies = make([1, 2]).repeat(3)
    whole = TrainingBatch.concat(copies)
    assert whole.sample_ids == ["0/0#0", "0/1#0", "0/0#1", "0/1#1", "0/0#2", "0/1#2"]


def test_nan_is_equal_to_itself_bitwise() -> None:
    batch = TrainingBatch({"x": torch.tensor([float("nan"), -0.0])}, sample_ids=["a", "b"])
    other = TrainingBatch({"x": torch.tensor([float("nan"), 0.0])}, sample_ids=["a", "b"])
    assert batch.equal(batch.clone()) and not batch.equal(other)


def test_operations_never_change_the_original() -> None:
    batch = make([1, 3])
    before = batch.clone()
    batch.with_tensors(extra=torch.zeros(2)).with_columns(note=["a", "b"]).pad_to(9)
    batch.clone()["input_ids"].zero_()
    assert batch.equal(before)


@pytest.mark.parametrize(
    ("make_it", "key", "says"),
    [
        (lambda: TrainingBatch({"x": torch.zeros(3)}, sample_ids=["a"]), "x", "(3,)"),
        (lambda: TrainingBatch({"x": torch.zeros(())}, sample_ids=["a"]), "x", "first dimension must be 1"),
        (lambda: TrainingBatch({"x": [1]}, sample_ids=["a"]), "x", "is a list"),
        (lambda: TrainingBatch({}, sample_ids=["a", "a"]), "sample_ids", "['a']"),
        (lambda: TrainingBatch({}, {"c": [1, 2]}, ["a"]), "c", "2 values for 1"),
        (lambda: TrainingBatch({"c": torch.zeros(1)}, {"c": [1]}, ["a"]), "c", "both"),
        (lambda: TrainingBatch({}, {}, ["a"], [1, 2]), "weight_versions", "2 entries for 1"),
        (
            lambda: TrainingBatch({"x": torch.zeros(1, 3), "y": torch.zeros(1, 4)}, {}, ["a"]),
            "y",
            "x has 3 token columns",
        ),
        (lambda: make([1, 2]).select([0, 0]), "sample_ids", "0/0"),
        (lambda: make([1, 2]).select([2]), "select", "outside 0..1"),
        (lambda: make([1, 2]).select([-1]), "select", "-1"),
        (lambda: make([1, 2]).slice(1, 3), "slice", "1..3"),
        (lambda: make([1, 2]).split_sizes([1, 2]), "split_sizes", "[1, 2]"),
        (lambda: make([1, 2]).split_sizes([3, -1]), "split_sizes", "[3, -1]"),
        (lambda: make([1, 2]).chunk(0), "chunk", "0 chunks"),
        (lambda: make([1, 5]).pad_to(3), "pad_to", "5 token columns"),
        (lambda: make([1])["nope"], "nope", "input_ids"),
        (lambda: make([1]).column("nope"), "nope", "record"),
        (lambda: make([1]).only("nope"), "nope", "input_ids"),
        (lambda: TrainingBatch.concat([]), "concat", "no batches"),
        (lambda: TrainingBatch.concat([make([1]), make([2])]), "sample_ids", "0/0"),
        (
            lambda: TrainingBatch.concat([make([1]), make([2], prefix="1").with_tensors(z=torch.zeros(1))]),
            "z",
            "only some batches",
        ),
        (
            lambda: TrainingBatch.concat([make([1]), make([2], prefix="1").with_tensors(reward=torch.zeros(1).double())]),
            "reward",
            "float64",
        ),
    ],
)
def test_errors_name_the_key_and_the_shapes(make_it, key: str, says: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(BatchError) as caught:
        make_it()
    assert caught.value.key == key and says in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))  # errors cross process borders
    assert str(again) == str(caught.value)
