"""Checkpoints: complete at one instant whenever we die, damage found and named, the right one chosen, state
bitwise back.
"""

from __future__ import annotations

import dataclasses
import errno
import gc
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from everstep.checkpoint import choose as choosing
from everstep.checkpoint.choose import adopt, choose
from everstep.checkpoint.export import write_shards
from everstep.checkpoint.index import INDEX, Index, Receipt, check_scalar, make_index
from everstep.checkpoint.manifest import (
    begin,
    checkpoint_folders,
    damage,
    existing,
    incomplete,
    pointed_at,
    publish,
    read_manifest,
    read_run_state,
    retire,
    set_pointer,
    verify,
)
from everstep.checkpoint.saving import inner_layout
from everstep.checkpoint.sharded import load_part, my_share, staged_files
from everstep.checkpoint.storage import (
    CheckpointError,
    as_json,
    local_folder,
    patiently,
    storage_errors,
    write_atomic,
    write_file,
)
from everstep.config.schema import Config
from everstep.engine.logical import Box, Fragment, LogicalState
from everstep.errors import BadInput
from everstep.layout import Layout
from everstep.run_dir import checkpoints_of, open_run_dir, prepare_run_dir
from support.checkpoints import entries_of, flip_a_bit

LAYOUT = Layout(replicas=2, tp=2)


def logical_state(step: int, rank: int = 0, ranks: int = 2) -> LogicalState:
    """Tensors of ``step``, cut by rows over ``ranks``; views of one flat buffer, as Megatron keeps them; bf16 and a row cut through."""
    flat = torch.arange(64, dtype=torch.float32) * (step + 1)
    whole = {"param/a": flat[:24].view(4, 6), "param/b": flat[24:40].view(16).to(torch.bfloat16), "exp_avg/a": flat[40:64].view(4, 6)}
    state = LogicalState(names={name: tuple(tensor.shape) for name, tensor in whole.items()})
    for name, tensor in whole.items():
        matrix = tensor.clone().view(len(tensor), -1)
        rows = len(matrix) // ranks
        if name == "exp_avg/a" and ranks == 2:  # the optimizer cuts anywhere: here in the middle of a row
            low, high = ((0, 2, 0, 6), (2, 1, 0, 3)), ((2, 1, 3, 3), (3, 1, 0, 6))
            boxes = [Box(*box) for box in (low, high)[rank]]
        else:
            boxes = [Box(rank * rows, rows, 0, matrix.shape[1])]
        for box in boxes:
            part = matrix[box.row : box.row + box.rows, box.col : box.col + box.cols].contiguous().view(-1)
            state.fragments.append(Fragment(name, tuple(tensor.shape), box, part, 1, 0))
    return state


def allocate(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def write_shares(folder: Path, step: int) -> list[Receipt]:
    receipts = []
    for rank in range(LAYOUT.ranks_per_replica):
        files, rectangles = {}, {}
        for file in staged_files(my_share({"model": logical_state(step, rank)}, 0, 1), f"{step:03d}-0.{rank:03d}", allocate):
            file.copy()
            content, rectangles[file.name] = file.finish()
            files[file.name] = write_file(folder / file.name, content)
        receipts.append(Receipt(rank, 0, files, rectangles, {"model": {"step": step, "lr": 1e-3 / 3}}))
    return receipts


def save(checkpoints: Path, step: int, keep_last: int = 10, keep_every: int = 0) -> Path:
    if there := existing(checkpoints, step):
        set_pointer(there)
        return there
    partial = begin(checkpoints, step)
    receipts = write_shares(partial, step)
    known = {path: entry for receipt in receipts for path, entry in receipt.files.items()}
    known[INDEX] = write_file(partial / INDEX, as_json(make_index(receipts)))
    final = publish(partial, step, inner_layout(LAYOUT), {"seen": step * 10}, known)
    retire(checkpoints, keep_last, keep_every)
    return final


def shard(folder: Path, rank: int = 0) -> Path:
    (found,) = folder.glob(f"state/*-0.{rank:03d}-*.safetensors")
    return found


def in_child(body: Callable[[], object]) -> int:
    """Run ``body`` in a forked process; its wait status (negative: killed by that signal)."""
    pid = os.fork()
    if pid == 0:
        code = 1
        gc.freeze()  # what the parent's threads use is not collected where they do not run
        try:
            body()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# ---------------------------------------------------------------- what is in the files


def test_state_comes_back_bitwise_into_the_given_tensors_however_it_is_cut(tmp_path: Path) -> None:
    index = Index(save(tmp_path, 3))
    for ranks in (1, 2, 4):
        for rank in range(ranks):
            expected, target = logical_state(3, rank, ranks), logical_state(0, rank, ranks)
            addresses = [fragment.tensor.data_ptr() for fragment in target.fragments]
            load_part(index, "model", target)
            for mine, theirs in zip(target.fragments, expected.fragments, strict=True):
                assert mine.tensor.dtype == theirs.tensor.dtype and torch.equal(mine.tensor, theirs.tensor), mine.name
            assert addresses == [fragment.tensor.data_ptr() for fragment in target.fragments], "written in place, not replaced"
    assert index.scalars_of("model") == [{"step": 3, "lr": 1e-3 / 3}] * 2
    with pytest.raises(BadInput, match=r"no state of critic; it has model"):
        index.scalars_of("critic")


def test_any_safetensors_reader_opens_the_files(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    loaded = load_file(shard(folder, 0)) | load_file(shard(folder, 1))
    assert set(loaded) == {"model/param/a[0:2,0:6]", "model/param/a[2:4,0:6]", "model/param/b[0:8,0:1]", "model/param/b[8:16,0:1]",
                           "model/exp_avg/a[0:2,0:6]", "model/exp_avg/a[2:3,0:3]", "model/exp_avg/a[2:3,3:6]", "model/exp_avg/a[3:4,0:6]"}
    assert torch.equal(loaded["model/param/a[2:4,0:6]"], 4 * torch.arange(12, 24, dtype=torch.float32).view(2, 6))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s.names.pop("param/a"), "has param/a, which the model has not"),
        (lambda s: s.names.update(new=(1,)), "lacks new"),
        (lambda s: s.names.update({"param/b": (2, 8)}), r"param/b has shape \[16\], the model's has \[2, 8\]"),
        (lambda s: s.fragments.append(Fragment("param/b", (16,), Box(0, 16, 0, 1), torch.zeros(16), 1, 0)), "param/b is BF16, the model's is F32"),
    ],
)
def test_a_mismatch_is_named_and_nothing_is_written(tmp_path: Path, change: Callable[[LogicalState], object], says: str) -> None:
    index = Index(save(tmp_path, 3))
    target = logical_state(0)
    change(target)
    before = [fragment.tensor.clone() for fragment in target.fragments]
    with pytest.raises(BadInput, match=says):
        load_part(index, "model", target)
    assert all(torch.equal(a, b.tensor) for a, b in zip(before, target.fragments, strict=True))


def test_damage_after_the_choice_is_found_while_loading(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    flip_a_bit(shard(folder, 1), -1)
    with pytest.raises(BadInput, match=r"0\.001-000\.safetensors: damaged in model/param/b\[8:16,0:1\]"):
        load_part(Index(folder), "model", logical_state(0, 0, 1))
    load_part(Index(folder), "model", logical_state(0, 0, 2))  # needs nothing of that file


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, float("nan"), torch.tensor(1), [object()]])
def test_a_scalar_that_json_would_change_is_refused(value: object) -> None:
    with pytest.raises(CheckpointError, match="scalar thing"):
        check_scalar("thing", value)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_ranks_that_hold_the_same_share_the_writing(replicas: int) -> None:
    """Six of two tensors' rectangles, each held by two ranks of every replica."""
    whole = torch.zeros(6, 4)
    state = [
        LogicalState([Fragment(f"param/{n}", (6, 4), Box(row, 2, 0, 4), whole[row : row + 2].view(-1), 2, turn) for n in "ab" for row in (0, 2, 4)])
        for turn in (0, 1)
    ]
    shares = [my_share({"model": state[turn]}, replica, replicas) for replica in range(replicas) for turn in (0, 1)]
    written = [(fragment.name, fragment.box) for share in shares for fragment in share]
    assert len(written) == len(set(written)) == 6
    assert max(map(len, shares)) - min(map(len, shares)) <= 2


def test_a_save_with_a_hole_or_two_truths_is_void(tmp_path: Path) -> None:
    receipts = write_shares(tmp_path, 1)
    hole = {file: [r for r in rectangles if r["name"] != "model/param/b"] for file, rectangles in receipts[1].rectangles.items()}
    with pytest.raises(CheckpointError, match=r"model/param/b: ranks wrote 8 of its 16 elements; the save is void"):
        make_index([receipts[0], dataclasses.replace(receipts[1], rectangles=hole)])
    other = dataclasses.replace(receipts[0], replica=1, rectangles={}, scalars={"model": {"step": 2, "lr": 1e-3 / 3}})
    with pytest.raises(CheckpointError, match="replicas 0 and 1 disagree on model"):
        make_index([*receipts, other])


# ---------------------------------------------------------------- publishing


def test_a_published_checkpoint_is_complete_and_described(tmp_path: Path) -> None:
    folder = save(tmp_path, 7)
    manifest = verify(folder)
    assert manifest.step == 7 and manifest.layout == {"tp": 2, "cp": 1, "ep": 1, "dp": 1, "pp": 1}
    assert set(manifest.files) == {"run.json", INDEX} | {f"state/007-0.00{r}-000.safetensors" for r in (0, 1)}
    assert manifest.files == {name: entry for name, entry in entries_of(folder).items() if name != "manifest.json"}
    assert read_run_state(folder) == {"seen": 70}
    assert pointed_at(tmp_path) == folder and sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-000007"]


def test_sigkill_at_every_stage_leaves_the_pointer_on_a_complete_checkpoint(tmp_path: Path) -> None:
    """A real process saves step 2 (and retires step 1) and is killed at its n-th touch of the folder, for
    every n.
    """
    killed, n = 0, 0
    seen_after: set[tuple[str, ...]] = set()
    while True:
        n += 1
        root = tmp_path / f"{n}"
        save(root, 1)

        def body(stage: int = n, root: Path = root) -> None:
            left = [stage]

            def hook(event: str, args: tuple[object, ...]) -> None:
                touches = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")
                if event in touches and (str(args[0]).startswith(str(root)) or event in ("os.remove", "os.rmdir")):
                    left[0] -= 1
                    if left[0] == 0:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)
            save(root, 2, keep_last=1)

        code = in_child(body)
        pointed = pointed_at(root)
        assert pointed is not None and damage(pointed) is None, f"stage {n}: pointer at {pointed}"
        chosen = choose(root, "must")
        assert chosen.path is not None and chosen.step >= (2 if code == 0 else 1)
        assert all(incomplete(folder) is None for folder in checkpoint_folders(root)), "named step-N means whole"
        seen_after.add(tuple(sorted(p.name for p in root.iterdir() if not p.name.startswith("."))))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        killed += 1
        # The next attempt resumes, saves on, and sweeps up what the dead one left.
        adopt(root, chosen)
        save(root, 3, keep_last=1)
        assert sorted(p.name for p in root.iterdir()) == ["latest", "step-000003"]
    assert killed > 20, "the save has more stages than this test reached"
    assert ("latest", "step-000001", "step-000002.partial") in seen_after
    assert ("latest", "step-000001", "step-000002") in seen_after
    assert ("latest", "step-000002") in seen_after


def test_saving_a_step_again_keeps_the_whole_one_and_replaces_a_damaged_one(tmp_path: Path) -> None:
    folder = save(tmp_path, 5)
    first = read_manifest(folder)
    assert save(tmp_path, 5) == folder and read_manifest(folder) == first
    flip_a_bit(shard(folder), -1)
    assert save(tmp_path, 5) == folder and damage(folder) is None
    assert damage(tmp_path / "step-000005.damaged"), "kept for a look"


def test_a_rank_whose_file_did_not_arrive_voids_the_save(tmp_path: Path) -> None:
    save(tmp_path, 1)
    partial = begin(tmp_path, 2)
    files = write_shares(partial, 2)[0].files
    shard(partial).unlink()
    with pytest.raises(CheckpointError, match=r"002-0\.000-000\.safetensors, but it is not there; do all nodes share"):
        publish(partial, 2, inner_layout(LAYOUT), {}, files)
    assert choose(tmp_path, "must").step == 1 and pointed_at(tmp_path) == tmp_path / "step-000001"


def test_everything_is_forced_to_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of power must not leave a name without its content. What is asked of the kernel, in order."""
    asked: list[tuple[str, str]] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def told(what: str, path: str, act: Callable[..., None], *args: object) -> None:
        act(*args)
        asked.append((what, os.path.relpath(path, tmp_path)))

    monkeypatch.setattr(os, "fsync", lambda fd: told("sync", os.readlink(f"/proc/self/fd/{fd}"), fsync, fd))
    monkeypatch.setattr(os, "rename", lambda source, target: told("name", str(target), rename, source, target))
    monkeypatch.setattr(os, "replace", lambda source, target: told("name", str(target), replace, source, target))
    folder = save(tmp_path, 2)
    work = "step-000002.partial"
    files = [f"{work}/{path.relative_to(folder)}" for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    manifest, published, pointed = (asked.index(("name", name)) for name in (f"{work}/manifest.json", "step-000002", "latest"))
    assert len(files) == 4 and all(("sync", name) in asked[:manifest] for name in (*files, work, f"{work}/state"))
    assert any(what == "sync" and ".manifest.json." in name for what, name in asked[:manifest])
    assert ("sync", work) in asked[manifest:published] and ("sync", ".") in asked[published:pointed]
    assert any(what == "sync" and name.startswith(".latest.") for what, name in asked[:pointed]) and ("sync", ".") in asked[pointed:]


def test_a_file_that_arrived_cut_short_voids_the_save(tmp_path: Path) -> None:
    partial = begin(tmp_path, 2)
    files = write_shares(partial, 2)[0].files
    os.truncate(shard(partial), 100)
    with pytest.raises(CheckpointError, match=r"002-0\.000-000\.safetensors: its rank wrote \d+ bytes, there are 100; the save is void"):
        publish(partial, 2, inner_layout(LAYOUT), {}, files)
    assert choose(tmp_path, "auto").path is None and pointed_at(tmp_path) is None


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("name", ["state/001-0.001-000.safetensors", INDEX, "run.json"])
def test_a_flipped_bit_is_found_in_any_file_and_named(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 1)
    flip_a_bit(folder / name, 10)
    assert incomplete(folder) is None, "the size is right"
    with pytest.raises(BadInput, match=rf"{name}: damaged, checksum"):
        verify(folder)


def test_the_tensor_with_the_flipped_bit_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    flip_a_bit(shard(folder, 1), -3)
    with pytest.raises(BadInput, match=r"0\.001-000\.safetensors: damaged in model/param/b\[8:16,0:1\], checksum"):
        verify(folder)


def test_every_flipped_bit_of_a_manifest_is_found(tmp_path: Path) -> None:
    """Sizes and checksums of the rest it has; of itself too."""
    path = save(tmp_path, 1) / "manifest.json"
    content = path.read_bytes()
    for at in range(len(content)):
        flipped = bytearray(content)
        flipped[at] ^= 1 << at % 7
        path.write_bytes(flipped)
        assert incomplete(tmp_path / "step-000001"), content[: at + 1].rpartition(b"\n")[2]
    raw = json.loads(content)
    path.write_text(json.dumps(raw))
    assert incomplete(tmp_path / "step-000001") is None, "laid out in another way it says the same"
    del raw["xxh3_128"]
    path.write_text(json.dumps(raw))
    assert incomplete(tmp_path / "step-000001") is None, "as everstep wrote it before"


def test_a_folder_with_the_name_of_another_step_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 3).rename(tmp_path / "step-000009")
    with pytest.raises(BadInput, match=r"is of step 3, which its folder's name is not; call it step-000003 again"):
        choose(tmp_path, "9")
    assert "is of step 3" in choose(tmp_path, "auto").explain()
    (tmp_path / "step-000009").rename(tmp_path / "the-good-one")
    assert choose(tmp_path, str(tmp_path / "the-good-one")).step == 3


@pytest.mark.parametrize("victim", ["", "step-000002/manifest.json", "step-000002/run.json"])
def test_what_cannot_be_looked_at_is_not_passed_over(victim: str) -> None:
    """Another user's files, say: the newest checkpoint may be whole, and to go on from an older one would lose steps."""
    with tempfile.TemporaryDirectory() as name:
        checkpoints = Path(name) / "checkpoints"
        for step in (1, 2):
            save(checkpoints, step)
        Path(name).chmod(0o755)
        (checkpoints / victim).chmod(0)

        def body() -> None:
            if os.geteuid() == 0:
                os.setuid(65534)  # root may read anything
            for resume in ("auto", "must", "2"):
                with pytest.raises(CheckpointError, match=r"failed: .*Permission denied.*; let this user read it$"):
                    choose(checkpoints, resume)

        assert in_child(body) == 0
        (checkpoints / victim).chmod(0o755)


def test_truncated_missing_and_unreadable_files_are_named(tmp_path: Path) -> None:
    short, gone, bare, torn, future, past = (save(tmp_path, step) for step in range(1, 7))
    data = shard(short)
    os.truncate(data, data.stat().st_size - 1)
    shard(gone, 1).unlink()
    (bare / "manifest.json").unlink()
    os.truncate(torn / "manifest.json", 40)
    manifest = json.loads((future / "manifest.json").read_text())
    (future / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    (past / "manifest.json").write_text(json.dumps({**manifest, "format": 1}))
    for folder, says in (
        (short, r"0\.000-000\.safetensors: has \d+ bytes, the manifest says \d+"),
        (gone, r"0\.001-000\.safetensors: No such file"),
        (bare, "no manifest.json, so the checkpoint is not complete"),
        (torn, "manifest.json: unreadable"),
        (future, "in format 99; upgrade everstep"),
        (past, r"in format 1, which is no longer read; .* model.path=.*/hf"),
    ):
        with pytest.raises(BadInput, match=says):
            verify(folder)


# ---------------------------------------------------------------- the disk refuses


def test_a_full_disk_is_a_typed_error_and_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def body() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # the kernel refuses every write beyond 100 bytes
        with pytest.raises(CheckpointError, match=r"writing .*file failed: .*resume=auto"), storage_errors("writing", tmp_path / "file"):
            write_file(tmp_path / "file", bytes(200))

    assert in_child(body) == 0
    partial = begin(tmp_path, 2)
    (partial / "run.json").symlink_to("/dev/full")  # a device that is always full
    with pytest.raises(CheckpointError, match=r"No space left.*free space there"):
        publish(partial, 2, inner_layout(LAYOUT), {}, {})
    assert choose(tmp_path, "must").step == 1 and pointed_at(tmp_path) == tmp_path / "step-000001"


def test_what_storage_refuses_is_tried_again_until_it_does_not_or_time_is_up(tmp_path: Path) -> None:
    tries: list[float] = []

    def action(path: Path) -> str:
        tries.append(time.monotonic())
        with storage_errors("writing", path):
            if len(tries) < 3:
                raise OSError(errno.ENOSPC, "No space left on device")
        return "done"

    noted: list[str] = []
    assert patiently(action, tmp_path, 60.0, note=noted.append) == "done" and len(tries) == 3
    assert tries[2] - tries[1] > 0.25 and len(noted) == 1 and "No space left" in noted[0]
    tries.clear()
    with pytest.raises(CheckpointError, match="free space"):
        patiently(action, tmp_path, 0.0)
    assert len(tries) == 1
    stop = threading.Event()
    stop.set()
    tries.clear()
    with pytest.raises(CheckpointError):
        patiently(action, tmp_path, 60.0, stop)


def test_a_read_only_folder_is_a_typed_error() -> None:
    with tempfile.TemporaryDirectory() as name:
        checkpoints = Path(name) / "checkpoints"
        save(checkpoints, 1)
        Path(name).chmod(0o755)
        checkpoints.chmod(0o555)

        def body() -> None:
            if os.geteuid() == 0:
                os.setuid(65534)  # root may write anywhere
            with pytest.raises(CheckpointError, match=r"preparing .*step-000002.partial failed: .*make the folder writable"):
                begin(checkpoints, 2)
            with pytest.raises(BadInput, match="cannot be prepared"):
                prepare_run_dir(config_of(Path(name) / "checkpoints" / "run"))

        assert in_child(body) == 0
        checkpoints.chmod(0o755)


def test_only_mounted_folders_are_accepted_for_a_run() -> None:
    assert local_folder("file:///tmp/x") == Path("/tmp/x") and local_folder("rel").is_absolute()
    with pytest.raises(BadInput, match="memory://x"):
        local_folder("memory://x")
    with pytest.raises(BadInput, match="nonsense://x"):
        local_folder("nonsense://x")


def test_write_atomic_replaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    write_atomic(tmp_path / "f", b"old")
    write_atomic(tmp_path / "f", b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["f"] and (tmp_path / "f").read_bytes() == b"new"


# ---------------------------------------------------------------- keeping few


def test_retention_keeps_the_newest_and_what_latest_names(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, keep_last=2)
    assert [p.name for p in checkpoint_folders(tmp_path)] == ["step-000003", "step-000002"]
    (tmp_path / "latest").write_text("step-000002\n")
    assert retire(tmp_path, keep_last=1) == []


def test_retention_never_deletes_the_only_good_one(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for step in (2, 3):
        flip_a_bit(shard(save(tmp_path, step)), -1)
    assert retire(tmp_path, keep_last=2) == [] and damage(tmp_path / "step-000001") is None
    save(tmp_path, 4, keep_last=2)  # keeps 4 (whole) and 3 (damaged): now 1 and 2 may go
    assert [p.name for p in checkpoint_folders(tmp_path)] == ["step-000004", "step-000003"]


def test_incomplete_folders_do_not_count_as_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "step-000003/manifest.json").unlink()
    (tmp_path / "latest").write_text("step-000002\n")
    assert retire(tmp_path, keep_last=2) == []
    assert [p.name for p in retire(tmp_path, keep_last=1)] == ["step-000001"]


def test_every_so_many_steps_one_is_kept_for_good(tmp_path: Path) -> None:
    for step in range(1, 10):
        save(tmp_path, step, keep_last=2, keep_every=3)
    assert [p.name for p in checkpoint_folders(tmp_path)] == ["step-000009", "step-000008", "step-000006", "step-000003"]


# ---------------------------------------------------------------- choosing


def test_auto_takes_the_newest_undamaged_and_says_why_not_the_others(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    flip_a_bit(tmp_path / "step-000003/run.json", 5)
    chosen = choose(tmp_path, "auto")
    assert (chosen.step, [path.name for path, _ in chosen.skipped]) == (2, ["step-000003"])
    text = chosen.explain()
    assert "continuing after step 2" in text and "skipped step-000003" in text and "run.json: damaged" in text
    assert adopt(tmp_path, chosen) == [tmp_path / "set-aside/step-000003"]
    assert pointed_at(tmp_path) == tmp_path / "step-000002"
    assert choose(tmp_path, "auto").skipped == []


def test_going_back_to_a_step_leaves_the_abandoned_future_out_of_sight(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "alias").symlink_to(tmp_path)
    by_path = choose(tmp_path, str(tmp_path / "alias/step-000001/"))
    chosen = choose(tmp_path, "1")
    assert [p for p, _ in by_path.skipped] == [p for p, _ in chosen.skipped]
    assert chosen.step == 1 and [p.name for p, _ in chosen.skipped] == ["step-000003", "step-000002"]
    adopt(tmp_path, chosen)
    assert choose(tmp_path, "auto").step == 1, "a crash right after must not return to step 3"
    assert damage(tmp_path / "set-aside/step-000003") is None, "but nothing is deleted"


def test_a_path_from_another_run_is_used_and_left_alone(tmp_path: Path) -> None:
    other = save(tmp_path / "other", 9)
    before = entries_of(tmp_path / "other")
    chosen = choose(tmp_path / "mine", str(other))
    assert (chosen.path, chosen.step, chosen.skipped) == (other, 9, [])
    (tmp_path / "mine").mkdir()
    assert adopt(tmp_path / "mine", chosen) == [] and pointed_at(tmp_path / "mine") is None
    assert entries_of(tmp_path / "other") == before


@pytest.mark.parametrize("own", [[12], [5, 9, 12]])
def test_what_a_run_saved_before_it_went_on_from_elsewhere_is_not_taken_for_its_own(tmp_path: Path, own: list[int]) -> None:
    """Else the save of step 12 would find one already, of another history, and a crash before it would return there."""
    other = save(tmp_path / "other", 9)
    for step in own:
        set_pointer(save(tmp_path / "mine", step), "best")
    mine = tmp_path / "mine"
    chosen = choose(mine, str(other))
    assert [path.name for path, _ in chosen.skipped] == [f"step-{step:06d}" for step in reversed(own) if step >= 9]
    adopt(mine, chosen)
    assert existing(mine, 9) is None and existing(mine, 12) is None and damage(mine / "set-aside/step-000012") is None
    assert pointed_at(mine) == (mine / "step-000005" if 5 in own else None), "it names what is there"
    assert pointed_at(mine, "best") is None
    set_aside = choose(mine, str(mine / "set-aside/step-000012"))
    assert (set_aside.step, set_aside.skipped) == (12, [])


def test_a_save_that_died_is_not_gone_on_from_by_its_path(tmp_path: Path) -> None:
    """It may be whole, but is swept up before it would be read."""
    save(tmp_path, 3)
    save(tmp_path, 4).rename(tmp_path / "step-000004.partial")
    with pytest.raises(BadInput, match=r"step-000004.partial: not a checkpoint but a save that died or is on its way"):
        choose(tmp_path, str(tmp_path / "step-000004.partial"))


def test_nothing_to_resume(tmp_path: Path) -> None:
    assert choose(tmp_path, "never").path is None
    assert "no usable checkpoint" in choose(tmp_path / "none", "auto").explain()
    with pytest.raises(BadInput, match=r"resume=must: no usable checkpoint .*none at all"):
        choose(tmp_path, "must")
    save(tmp_path, 4)
    flip_a_bit(tmp_path / "step-000004/run.json", 5)
    with pytest.raises(BadInput, match=r"resume=must.*\n  step-000004: .*run.json: damaged"):
        choose(tmp_path, "must")
    with pytest.raises(BadInput, match="resume=4: that checkpoint is not usable"):
        choose(tmp_path, "4")
    with pytest.raises(BadInput, match=r"resume=7: no such step.*there are: 4"):
        choose(tmp_path, "7")
    with pytest.raises(BadInput, match="no such folder"):
        choose(tmp_path, "atuo")
    with pytest.raises(BadInput, match=r"not a checkpoint.*did you mean .*step-000004"):
        choose(tmp_path, str(tmp_path))
    assert choosing.BadInput.exit_code == 2


# ---------------------------------------------------------------- the run's folder


def config_of(run_dir: Path, resume: str = "never") -> Config:
    return Config.model_validate(
        {"recipe": "sft", "run_dir": str(run_dir), "resume": resume, "model": {"path": "m"}, "data": {"source": "d"}}
    )


def test_a_used_run_folder_needs_a_word_from_the_user(tmp_path: Path) -> None:
    path = tmp_path / "runs/a"
    run = prepare_run_dir(config_of(path))
    assert run.attempt == 1 and run.logs == path / "logs/attempt-1" and run.logs.is_dir()
    assert run.rank_log(3) == path / "logs/attempt-1/rank-003.log"
    save(checkpoints_of(config_of(path)), 1)
    with pytest.raises(BadInput, match=r"has been used.*resume=auto.*--clean"):
        prepare_run_dir(config_of(path))
    again = prepare_run_dir(config_of(path, "auto"))
    assert again.attempt == 2 and (path / "logs/latest").resolve() == again.logs
    assert open_run_dir(path) == again and choose(path / "checkpoints", "auto").step == 1
    with pytest.raises(BadInput, match="give one of them"):
        prepare_run_dir(config_of(path, "auto"), clean=True)
    fresh = prepare_run_dir(config_of(path), clean=True)
    assert fresh.attempt == 1 and list((path / "checkpoints").iterdir()) == []


def test_clean_deletes_only_what_a_run_makes(tmp_path: Path) -> None:
    run = prepare_run_dir(config_of(tmp_path / "a"))
    (run.path / "notes.txt").write_text("mine")
    prepare_run_dir(config_of(tmp_path / "a"), clean=True)
    assert (run.path / "notes.txt").read_text() == "mine"
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis.tex").write_text("years of work")
    with pytest.raises(BadInput, match=r"holds other things .thesis.tex"):
        prepare_run_dir(config_of(tmp_path / "home"), clean=True)
    with pytest.raises(BadInput, match="is a file"):
        prepare_run_dir(config_of(tmp_path / "home/thesis.tex"))
    with pytest.raises(BadInput, match="not a run folder"):
        open_run_dir(tmp_path / "home")


# ---------------------------------------------------------------- for transformers


@pytest.mark.parametrize("shards", ["one", "many"])
def test_exported_weights_are_loaded_by_transformers_bitwise(tmp_path: Path, shards: str) -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).float()
    weights = dict(model.state_dict())
    listed = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()]
    config.save_pretrained(tmp_path)
    written = write_shards(tmp_path, listed, weights.__getitem__, 1 << 30 if shards == "one" else 4000)
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert (files == ["model.safetensors"]) == (shards == "one")
    assert written == {name: entry for name, entry in entries_of(tmp_path).items() if not name.endswith("config.json")}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in loaded.state_dict().items())
    with pytest.raises(CheckpointError, match=r"was announced"):
        write_shards(tmp_path / "x", listed, lambda name: weights[name].double())
