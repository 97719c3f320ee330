"""Checkpoints: complete at one instant whenever we die, damage found and named, the right one chosen, state
bitwise back.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from everstep.checkpoint import choose as choosing
from everstep.checkpoint.choose import adopt, choose
from everstep.checkpoint.manifest import (
    FileEntry,
    begin,
    checkpoint_folders,
    damage,
    incomplete,
    pointed_at,
    publish,
    read_manifest,
    read_run_state,
    retire,
    verify,
)
from everstep.checkpoint.sharded import inner_layout, load_rank, save_hf, save_rank
from everstep.checkpoint.storage import CheckpointError, digest, local_folder, write_atomic
from everstep.config.schema import Config
from everstep.errors import BadInput
from everstep.layout import Layout
from everstep.run_dir import open_run_dir, prepare_run_dir

LAYOUT = Layout(replicas=2, tp=2)


def state_of(step: int, rank: int = 0) -> dict[str, Tensor]:
    """Views of one flat buffer, as Megatron keeps them; bf16, a scalar and an empty shard included."""
    flat = torch.arange(64, dtype=torch.float32) * (step + 1) + rank
    return {
        "param/a": flat[:24].view(4, 6).t(),  # not contiguous
        "param/b": flat[24:40],
        "master/b": flat[24:40].to(torch.bfloat16),
        "exp_avg/none": torch.empty(0),
        "count": torch.tensor(step, dtype=torch.int64),
    }


def save(checkpoints: Path, step: int, keep_last: int = 10) -> Path:
    partial = begin(checkpoints, step)
    known: dict[str, FileEntry] = {}
    for rank in range(LAYOUT.ranks_per_replica):
        known |= save_rank(state_of(step, rank), {"step": step, "lr": 1e-3 / 3}, partial, rank, LAYOUT).files
    return publish(partial, step, inner_layout(LAYOUT), {"seen": step * 10}, keep_last, known)


def in_child(body: Callable[[], None]) -> int:
    """Run ``body`` in a forked process; its wait status (negative: killed by that signal)."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def flip_a_bit(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# ---------------------------------------------------------------- one rank's state


def test_state_comes_back_bitwise_into_the_given_views(tmp_path: Path) -> None:
    save(tmp_path, 3)
    for rank in range(2):
        expected, target = state_of(3, rank), state_of(0, rank)
        whole = target["param/b"]._base
        scalars = load_rank(target, tmp_path / "step-000003", rank, LAYOUT)
        assert scalars == {"step": 3, "lr": 1e-3 / 3}
        for name, tensor in target.items():
            assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name
        assert whole is not None and whole[24] == expected["param/b"][0], "written into the buffer, not replaced"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s.pop("param/a"), "has param/a, which the model has not"),
        (lambda s: s.update(new=torch.zeros(1)), "lacks new"),
        (lambda s: s.update({"param/b": torch.zeros(2, 8)}), r"param/b is float32\[16\], the model has float32\[2, 8\]"),
        (lambda s: s.update({"param/b": torch.zeros(16).double()}), r"the model has float64\[16\]"),
    ],
)
def test_a_mismatch_is_named_and_nothing_is_written(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], says: str
) -> None:
    save(tmp_path, 3)
    target = state_of(0)
    change(target)
    before = {name: tensor.clone() for name, tensor in target.items()}
    with pytest.raises(BadInput, match=says):
        load_rank(target, tmp_path / "step-000003", 0, LAYOUT)
    assert all(torch.equal(target[name], before[name]) for name in target)


def test_another_layout_is_refused_with_both_named_and_the_way_out(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    with pytest.raises(BadInput, match=r"saved with tp=2 cp=1.*configured are tp=1 .*pp=2.*model.path=.*/hf"):
        load_rank(state_of(0), folder, 0, Layout(replicas=2, pp=2))
    with pytest.raises(BadInput, match=r"saved with tp=2 .*configured are tp=2 .*pp=2 vpp=2 layers_per_stage=\[1, 2, 1, 1\]"):
        load_rank(state_of(0), folder, 0, Layout(tp=2, pp=2, vpp=2, layers_per_stage=(1, 2, 1, 1)))
    assert load_rank(state_of(0), folder, 0, Layout(replicas=5, spares=1, tp=2)), "any number of replicas"


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, float("nan"), torch.tensor(1), [object()]])
def test_a_scalar_that_json_would_change_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(CheckpointError, match="scalar thing"):
        save_rank({}, {"thing": value}, tmp_path, 0, LAYOUT)


# ---------------------------------------------------------------- publishing


def test_a_published_checkpoint_is_complete_and_described(tmp_path: Path) -> None:
    folder = save(tmp_path, 7)
    manifest = verify(folder)
    assert manifest.step == 7 and manifest.layout == {"tp": 2, "cp": 1, "ep": 1, "dp": 1, "pp": 1}
    assert set(manifest.files) == {"run.json"} | {f"state/rank-00{r}.{e}" for r in (0, 1) for e in ("json", "safetensors")}
    for name, entry in manifest.files.items():
        assert entry == FileEntry((folder / name).stat().st_size, digest(folder / name))
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
    flip_a_bit(folder / "state/rank-000.safetensors", -1)
    assert save(tmp_path, 5) == folder and damage(folder) is None
    assert damage(tmp_path / "step-000005.damaged"), "kept for a look"


def test_a_rank_whose_file_did_not_arrive_voids_the_save(tmp_path: Path) -> None:
    save(tmp_path, 1)
    partial = begin(tmp_path, 2)
    shard = save_rank(state_of(2), {}, partial, 0, LAYOUT)
    (partial / "state/rank-000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"rank-000\.safetensors, but it is not there; do all nodes share"):
        publish(partial, 2, inner_layout(LAYOUT), {}, 1, shard.files)
    assert choose(tmp_path, "must").step == 1 and pointed_at(tmp_path) == tmp_path / "step-000001"


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("name", ["state/rank-001.safetensors", "state/rank-000.json", "run.json"])
def test_a_flipped_bit_is_found_in_any_file_and_named(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 1)
    flip_a_bit(folder / name, 10)
    assert incomplete(folder) is None, "the size is right"
    with pytest.raises(BadInput, match=rf"{name}: damaged"):
        verify(folder)


def test_truncated_missing_and_unreadable_files_are_named(tmp_path: Path) -> None:
    short, gone, bare, torn, future = (save(tmp_path, step) for step in (1, 2, 3, 4, 5))
    data = short / "state/rank-000.safetensors"
    os.truncate(data, data.stat().st_size - 1)
    (gone / "state/rank-001.json").unlink()
    (bare / "manifest.json").unlink()
    os.truncate(torn / "manifest.json", 40)
    manifest = json.loads((future / "manifest.json").read_text())
    (future / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    for folder, says in (
        (short, r"rank-000.safetensors: has \d+ bytes, the manifest says \d+"),
        (gone, "rank-001.json: No such file"),
        (bare, "no manifest.json, so the checkpoint is not complete"),
        (torn, "manifest.json: unreadable"),
        (future, "in format 99; upgrade everstep"),
    ):
        with pytest.raises(BadInput, match=says):
            verify(folder)


# ---------------------------------------------------------------- the disk refuses


def test_a_full_disk_is_a_typed_error_and_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def body() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # the kernel refuses every write beyond 100 bytes
        with pytest.raises(CheckpointError, match=r"writing .*rank-000.*failed: .*resume=auto"):
            save(tmp_path, 2)

    assert in_child(body) == 0
    partial = begin(tmp_path, 2)
    (partial / f".run.json.{os.getpid()}.tmp").symlink_to("/dev/full")  # a device that is always full
    with pytest.raises(CheckpointError, match=r"No space left.*free space there"):
        publish(partial, 2, inner_layout(LAYOUT), {}, 1)
    assert choose(tmp_path, "must").step == 1 and pointed_at(tmp_path) == tmp_path / "step-000001"


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


def test_only_mounted_folders_are_accepted() -> None:
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
        flip_a_bit(save(tmp_path, step) / "state/rank-000.safetensors", -1)
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
    save(tmp_path / "mine", 12)
    chosen = choose(tmp_path / "mine", str(other))
    assert (chosen.path, chosen.step, chosen.skipped) == (other, 9, [])
    assert adopt(tmp_path / "mine", chosen) == [] and pointed_at(tmp_path / "mine") == tmp_path / "mine/step-000012"


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
    save(run.checkpoints, 1)
    with pytest.raises(BadInput, match=r"has been used.*resume=auto.*--clean"):
        prepare_run_dir(config_of(path))
    again = prepare_run_dir(config_of(path, "auto"))
    assert again.attempt == 2 and (path / "logs/latest").resolve() == again.logs
    assert open_run_dir(path) == again and choose(again.checkpoints, "auto").step == 1
    with pytest.raises(BadInput, match="give one of them"):
        prepare_run_dir(config_of(path, "auto"), clean=True)
    fresh = prepare_run_dir(config_of(path), clean=True)
    assert fresh.attempt == 1 and list(fresh.checkpoints.iterdir()) == []


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
def test_save_hf_is_loaded_by_transformers_bitwise(tmp_path: Path, shards: str) -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=32, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).float()
    weights = dict(model.state_dict())
    save_hf(iter(weights.items()), config, None, tmp_path, max_shard_bytes=1 << 30 if shards == "one" else 4000)
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert (files == ["model.safetensors"]) == (shards == "one") and not list(tmp_path.glob("*.tmp"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.float32, "the type of the weights, not of the model they came from"
    assert all(torch.equal(tensor, weights[name]) for name, tensor in loaded.state_dict().items())
    assert config.dtype == torch.bfloat16, "the caller's config is not changed"


def test_save_hf_on_a_rank_that_does_not_write_still_takes_part(tmp_path: Path) -> None:
    left = iter([("a", torch.zeros(1)), ("b", torch.zeros(1))])
    save_hf(left, None, None, tmp_path / "hf", write=False)
    assert list(left) == [] and not (tmp_path / "hf").exists()
    with pytest.raises(CheckpointError, match="a came twice"):
        save_hf(iter([("a", torch.zeros(1))] * 2), None, None, tmp_path / "hf")
