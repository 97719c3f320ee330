"""How many samples a second GRPO makes and trains on one device, against TRL's GRPOTrainer: same weights, prompts, lengths, reward.

    python -m benchmarks.rl                                          SmolLM2-135M's and Qwen3-0.6B's shape, on the GPU
    python -m benchmarks.rl --shape qwen3-0.6b --contenders everstep-vllm trl-vllm --iterations 6
    python -m benchmarks.rl --quick                                  a tiny model, also on the CPU: does it run
    python -m benchmarks.rl --contenders everstep-engine --kill-every 30 --seconds 180     what it costs that an engine is killed

Every contender is one process tree that stays up, and they take turns, one iteration each (``--warm`` rounds are not counted), so that
what else the machine does strikes all alike. Weights are random, so nearly all completions have the greatest length. One iteration:
``--prompts`` prompts, ``--samples`` completions each of at most ``--response`` tokens, rewards, one optimizer step over all of them in
micro-batches of ``--micro``; no KL term, bfloat16.

    everstep          ranks generate themselves (rollout.engine=transformers)
    everstep-engine   an engine process on the rank's device does (rollout.engines=1, rollout.colocated)
    everstep-vllm     the same with vLLM                                    needs vllm
    trl, trl-vllm     TRL's GRPOTrainer, without gradient checkpointing, weights and moments in bfloat16 (everstep has float32 masters);
                      with ``use_vllm`` in its colocated mode               needs trl (and its datasets, dill, multiprocess, pandas)

Prints a table and writes ``--out`` (JSON), with machine, versions and command. ``generate``: samples are made, weights brought to the
engine included; ``reward``; ``train``: the optimizer step; ``other``: the rest of the iteration. Sync is what an engine got, bytes over
the seconds in which they came, without connecting and waking (``benchmarks.sync`` has the transfer by itself); beside it what one TCP
connection and, on a GPU, a copy into page-locked memory move on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.circumstances import ROOT, circumstances

CONTENDERS = ("everstep", "everstep-engine", "everstep-vllm", "trl", "trl-vllm")
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "rope_theta": 100000,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    },
    "qwen3-0.6b": json.loads((ROOT / "benchmarks/shapes/qwen3-0.6b/config.json").read_text()),
    "tiny": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 512, "tie_word_embeddings": True,
    },
}  # fmt: skip
WORD = "@@ "  # what a contender says to us begins with it; the rest of its output is its libraries'
START_S, ITERATION_S = 400.0, 300.0


def reward(prompt: Any, completion: str, record: Any) -> float:
    """How varied the words are: cheap, and never the same for all samples of a prompt."""
    words = completion.split()
    return len(set(words)) / max(len(words), 1)


# -- in a contender's process ----------------------------------------------------------------------------------------------


def say(what: dict[str, Any]) -> None:
    print(WORD + json.dumps(what), flush=True)


def told_to_go() -> bool:
    return sys.stdin.readline().strip() == "go"


def everstep_contender(s: dict[str, Any], kind: str) -> None:
    import everstep
    from everstep.cluster.batch import TrainingBatch
    from everstep.config import derive
    from everstep.data import SampleStream, check
    from everstep.recipes.updates import transactions
    from everstep.rl import pipeline
    from everstep.rl.execute import Context, execute, named
    from everstep.rl.record import IterationRecord
    from everstep.rl.rewards import Scorer, without_dropped
    from everstep.rl.rollout import repeat_prompts

    config = everstep.load_config(s["config"], overrides_for(s, kind))
    data, sizes, stages = check(config).train, derive.sizes(config), pipeline.resolve(config)
    stream = SampleStream(len(data), config.seed)

    def prompts(count: int) -> TrainingBatch:
        return repeat_prompts(data.batch(stream.take(count)), config.rl.samples_per_prompt)

    with contextlib.closing(everstep.launch(config, clean=True)) as group, Scorer(config) as scorer:
        say({"ready": True})
        iteration = 0
        while told_to_go():
            iteration, start, began_at = iteration + 1, time.monotonic(), group.committed_step
            context = Context(config, iteration, scorer, 0.0, prompts, lambda dropped: None)
            made = execute(stages, context, group, prompts(config.rl.prompts_per_step), None)
            samples = without_dropped(made.samples)
            record = IterationRecord(iteration, began_at, sizes.updates_of(iteration), config.rl.prompts_per_step, "", samples, {})
            training = time.monotonic()
            for step in transactions(config, stages, record, done=0):
                group.train_step(step.batch, named(step.update.loss)(context), step.lr, config.rollout.temperature, step.update.role, step.about)
            end = time.monotonic()
            say({"seconds": end - start, "generate": made.seconds["rollout"], "reward": made.seconds["reward"], "train": end - training,
                 "samples": len(samples), "tokens": int(samples["loss_mask"].sum())})


def overrides_for(s: dict[str, Any], kind: str) -> list[str]:
    engines = [] if kind == "everstep" else [f"rollout.engines={s['engines']}", f"rollout.colocated={str(s['engines'] == 1).lower()}"]
    if kind == "everstep-vllm":
        engines += ["rollout.engine=vllm", f"rollout.gpu_memory_fraction={s['vllm_memory']}"]
    return [f"run_dir={s['folder']}/{kind}", *engines]


def trl_contender(s: dict[str, Any], kind: str) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    cuda = s["device"] == "cuda"
    model = AutoModelForCausalLM.from_pretrained(s["model"], dtype=torch.bfloat16 if cuda else torch.float32)
    records = [json.loads(line) for line in Path(s["data"]).read_text().splitlines()]
    total = s["prompts"] * s["samples"]
    spent = dict.fromkeys(("generate", "reward"), 0.0)
    made = {"tokens": 0}

    def timed(trainer: Any, method: str, stage: str) -> None:
        inner = getattr(trainer, method)

        def outer(*args: Any, **kwargs: Any) -> Any:
            start = time.monotonic()
            result = inner(*args, **kwargs)
            if cuda:
                torch.cuda.synchronize()
            spent[stage] += time.monotonic() - start
            return result

        setattr(trainer, method, outer)

    def rewards(prompts: list[Any], completions: list[str], completion_ids: list[list[int]], **more: Any) -> list[float]:
        made["tokens"] = sum(map(len, completion_ids))
        return [reward(p, c, None) for p, c in zip(prompts, completions, strict=True)]

    class Turns(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if not told_to_go():
                os._exit(0)
            spent.update(generate=0.0, reward=0.0)
            self.start = time.monotonic()

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if cuda:
                torch.cuda.synchronize()
            seconds = time.monotonic() - self.start
            say({"seconds": seconds, **spent, "train": seconds - sum(spent.values()), "samples": total, "tokens": made["tokens"]})

    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": s["vllm_memory"], "vllm_enable_sleep_mode": True}
    arguments = GRPOConfig(
        output_dir=f"{s['folder']}/{kind}", per_device_train_batch_size=s["micro"], gradient_accumulation_steps=total // s["micro"],
        num_generations=s["samples"], max_completion_length=s["response"], learning_rate=1e-6, lr_scheduler_type="constant", beta=0.0,
        gradient_checkpointing=False, bf16=cuda, use_cpu=not cuda, max_steps=10**6, save_strategy="no", report_to=[], logging_steps=1000,
        disable_tqdm=True, temperature=1.0, seed=0, **(vllm if kind == "trl-vllm" else {}),
    )
    turns = Turns()
    trainer = GRPOTrainer(model=model, reward_funcs=rewards, args=arguments, train_dataset=Dataset.from_list(records),
                          processing_class=AutoTokenizer.from_pretrained(s["model"]), callbacks=[turns])
    timed(trainer, "_generate", "generate")
    timed(trainer, "_calculate_rewards", "reward")
    say({"ready": True})
    trainer.train()


# -- the parent ------------------------------------------------------------------------------------------------------------


class Contender:
    """A process that makes an iteration whenever it is told to. RuntimeError if it ends, or is not heard of in time."""

    def __init__(self, kind: str, folder: Path):
        self.kind, self.log = kind, folder / f"{kind}.log"
        command = [sys.executable, "-m", "benchmarks.rl", "--contender", kind, "--settings", str(folder / "settings.json")]
        self._errors = self.log.open("w")
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
                                         start_new_session=True, env=os.environ | {"PYTHONPATH": f"{ROOT}/src:{ROOT}:{os.environ.get('PYTHONPATH', '')}"})
        start = time.monotonic()
        self._hear(START_S)
        self.start_s = time.monotonic() - start

    def iterate(self) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self._hear(ITERATION_S)

    def _hear(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout
        timer = threading.Timer(limit_s, self.end)
        timer.start()
        try:
            for line in self._process.stdout:
                if line.startswith(WORD):
                    said: dict[str, Any] = json.loads(line.removeprefix(WORD))
                    return said
                self._errors.write(line)
        finally:
            timer.cancel()
        self._errors.flush()
        raise RuntimeError(f"{self.kind} ended, or said nothing for {limit_s:g} s: " + " | ".join(self.log.read_text().splitlines()[-8:]))

    def end(self) -> None:
        if self._process.stdin and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()  # it ends in order
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._errors.close()


def throughput(kinds: Sequence[str], s: dict[str, Any], rounds: int, warm: int) -> dict[str, Any]:
    """Rows by contender: medians over the rounds, and every iteration."""
    folder, living, rows = Path(s["folder"]), dict[str, Contender](), dict[str, Any]()
    iterations: dict[str, list[dict[str, Any]]] = {}
    try:
        for kind in kinds:
            try:
                living[kind] = Contender(kind, folder)
            except RuntimeError as error:
                rows[kind] = {"problem": str(error)}
        for number in range(warm + rounds):
            for kind in list(living):
                try:
                    made = living[kind].iterate()
                except RuntimeError as error:
                    rows[kind] = {"problem": str(error)}
                    living.pop(kind).end()
                    continue
                if number >= warm:
                    iterations.setdefault(kind, []).append(made)
        for kind, contender in living.items():
            rows[kind] = summary(iterations[kind]) | {"start_s": contender.start_s, "iterations": iterations[kind]}
    finally:
        for contender in living.values():
            contender.end()
    for kind in rows:
        if sync := syncs(folder / kind):
            rows[kind]["sync"] = sync
    return rows


def summary(iterations: list[dict[str, Any]]) -> dict[str, float]:
    median = lambda name: statistics.median(one[name] for one in iterations)
    parts = {name: median(name) for name in ("seconds", "generate", "reward", "train")}
    return {
        "samples_per_s": statistics.median(one["samples"] / one["seconds"] for one in iterations),
        "tokens_per_s": statistics.median(one["tokens"] / one["seconds"] for one in iterations), **parts,
        "other": max(0.0, parts["seconds"] - parts["generate"] - parts["reward"] - parts["train"]),
        "tokens_per_sample": statistics.median(one["tokens"] / one["samples"] for one in iterations),
    }


def syncs(run_dir: Path) -> dict[str, float]:
    """Of the transfers of weights to engines in a run, the first (connections, allocations) left out."""
    from everstep.telemetry.events import of_kind, read_events

    if not (run_dir / "events").is_dir():
        return {}
    found = of_kind(read_events(run_dir / "events"), "rollout_sync")[1:]
    if not found:
        return {}
    return {"transfers": len(found), "way": found[-1]["way"], "bytes": found[-1]["nbytes"], "seconds": statistics.median(e["seconds"] for e in found),
            "transfer": statistics.median(e["transfer"] for e in found), "gb_per_s": statistics.median(e["nbytes"] / e["transfer"] for e in found) / 1e9}


def with_kills(kind: str, s: dict[str, Any], seconds: float, every_s: float, warm: int) -> dict[str, Any]:
    """Samples per second of the same process without kills, and then with a SIGKILL to a rollout engine every ``every_s``."""
    contender, folder = Contender(kind, Path(s["folder"])), Path(s["folder"]) / kind
    try:
        for _ in range(warm):
            contender.iterate()
        undisturbed = iterate_for(contender, seconds)
        with killing(folder, every_s) as killed:
            disturbed = iterate_for(contender, seconds)
        quiet, struck = (one["samples"] / one["seconds"] for one in (undisturbed, disturbed))
    finally:
        contender.end()
    from everstep.telemetry.history import check

    broken = [f.text for f in check(folder) if f.held is False]
    return {"kind": kind, "kills": len(killed), "every_s": every_s, "undisturbed": undisturbed, "disturbed": disturbed, "samples_per_s": quiet,
            "samples_per_s_with_kills": struck, "ratio": struck / quiet, "broken_invariants": broken}


def iterate_for(contender: Contender, seconds: float) -> dict[str, float]:
    start, samples, iterations = time.monotonic(), 0, 0
    while time.monotonic() - start < seconds:
        samples += contender.iterate()["samples"]
        iterations += 1
    return {"samples": samples, "iterations": iterations, "seconds": time.monotonic() - start}


@contextlib.contextmanager
def killing(run_dir: Path, every_s: float) -> Iterator[list[int]]:
    """Every so often one of the run's living engines gets a SIGKILL; yields the pids so far."""
    from everstep.telemetry.events import of_kind, read_events

    killed: list[int] = []
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(every_s):
            pids = [e.pid for e in of_kind(read_events(run_dir / "events"), "process_start") if e.who.startswith("e") and e.pid not in killed]
            if pids:  # the one that was started last: others may have ended otherwise
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pids[-1], signal.SIGKILL)
                killed.append(pids[-1])

    thread = threading.Thread(target=work, name="killer")
    thread.start()
    try:
        yield killed
    finally:
        stop.set()
        thread.join()


def link_limits(device: str) -> dict[str, float]:
    """GB/s of one TCP connection of this machine, and of copies from the device into page-locked memory."""
    limits = {"tcp_gb_per_s": _tcp(1 << 30 if device == "cuda" else 1 << 27)}
    if device == "cuda":
        import torch

        there, here = torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
        here.copy_(there)
        torch.cuda.synchronize()
        start = time.monotonic()
        for _ in range(8):
            here.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        limits["pinned_gb_per_s"] = 8 * (256 << 20) / (time.monotonic() - start) / 1e9
    return limits


def _tcp(nbytes: int) -> float:
    data = memoryview(bytearray(32 << 20))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def send() -> None:
            with socket.create_connection(listener.getsockname()) as out:
                for _ in range(0, nbytes, len(data)):
                    out.sendall(data)

        thread = threading.Thread(target=send)
        thread.start()
        into, got = bytearray(32 << 20), 0
        connection, _ = listener.accept()
        with connection:
            start = time.monotonic()
            while n := connection.recv_into(into):
                got += n
            seconds = time.monotonic() - start
        thread.join()
    return got / seconds / 1e9


def config_of(shape: str) -> Any:
    """Of transformers."""
    from transformers import AutoConfig

    given = dict(SHAPES[shape])
    return AutoConfig.for_model(given.pop("model_type"), **given | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})


def prepare(folder: Path, shape: str, options: argparse.Namespace, device: str) -> dict[str, Any]:
    """Model, tokenizer and prompts that every contender reads."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    config = config_of(shape)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, config.vocab_size)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model = folder / "model"
    PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>", eos_token="</s>", pad_token="<pad>").save_pretrained(model)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32).save_pretrained(model)
    draw = torch.randint(3, config.vocab_size, (512, options.prompt), generator=torch.Generator().manual_seed(0))
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": " ".join(f"w{t}" for t in row)}) + "\n" for row in draw.tolist()))
    total = options.prompts * options.samples
    settings = {
        "folder": str(folder), "model": str(model), "data": str(data), "device": device, "prompts": options.prompts, "samples": options.samples,
        "response": options.response, "micro": options.micro, "vllm_memory": options.vllm_memory, "engines": options.engines, "config": str(folder / "grpo.yaml"),
    }
    everstep: dict[str, Any] = {
        "recipe": "grpo", "run_dir": str(folder / "run"), "device": device, "seed": 0,
        "model": {"path": str(model), "dtype": "bfloat16" if device == "cuda" else "float32"}, "layout": {"replicas": 1}, "engine": {"deterministic": False},
        "optimizer": {"lr": 1e-6}, "train": {"micro_batch_size": options.micro},
        "data": {"source": str(data), "format": "prompt", "max_prompt_tokens": options.prompt + 8, "max_tokens": options.prompt + 8 + options.response},
        "rl": {"iterations": 10**6, "prompts_per_step": options.prompts, "samples_per_prompt": options.samples},
        "rollout": {"max_response_tokens": options.response, "samples_per_batch": total}, "reward": {"function": "benchmarks.rl:reward"},
        "checkpoint": {"every_steps": 0, "at_end": False}, "telemetry": {"progress": "none", "tensorboard": False},
    }  # fmt: skip
    if options.engines > 0 and options.kill_every:
        everstep["rollout"] |= {"engine_restarts": 1000}
    Path(settings["config"]).write_text(json.dumps(everstep))  # JSON is YAML
    (folder / "settings.json").write_text(json.dumps(settings))
    return settings


@contextlib.contextmanager
def folder_of(keep: Path | None, shape: str) -> Iterator[Path]:
    if keep:
        (keep / shape).mkdir(parents=True, exist_ok=True)
        yield (keep / shape).absolute()
        return
    with tempfile.TemporaryDirectory(prefix="everstep-rl-") as folder:
        yield Path(folder)


def table(shape: str, rows: dict[str, Any]) -> str:
    best = max((row["samples_per_s"] for kind, row in rows.items() if kind.startswith("trl") and "problem" not in row), default=None)
    lines = [f"{shape:18} {'samples/s':>10} {'x TRL':>6} {'seconds':>8} {'generate':>9} {'reward':>7} {'train':>7} {'other':>6} {'tokens/sample':>14} {'sync GB/s':>10}"]
    for kind, row in rows.items():
        if "problem" in row:
            lines.append(f"{kind:18} {row['problem'][:150]}")
            continue
        ratio = f"{row['samples_per_s'] / best:6.2f}" if best else f"{'':6}"
        sync = f"{row['sync']['gb_per_s']:10.2f}" if row.get("sync") else ""
        lines.append(f"{kind:18} {row['samples_per_s']:10.2f} {ratio} {row['seconds']:8.3f} {row['generate']:9.3f} {row['reward']:7.3f} "
                     f"{row['train']:7.3f} {row['other']:6.3f} {row['tokens_per_sample']:14.1f} {sync}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=["smollm2-135m", "qwen3-0.6b"])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=["everstep", "trl"])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--response", type=int, default=256, help="tokens")
    parser.add_argument("--micro", type=int, default=16, help="samples of a forward pass in training")
    parser.add_argument("--iterations", type=int, default=5, help="that count, of each contender")
    parser.add_argument("--warm", type=int, default=2, help="iterations before")
    parser.add_argument("--engines", type=int, default=1, help="rollout engines; 1: on the rank's device, more: devices of their own")
    parser.add_argument("--vllm-memory", type=float, default=0.3, help="share of the device's memory that vLLM takes")
    parser.add_argument("--kill-every", type=float, default=0.0, help="seconds between kills of an engine; then only the first contender runs")
    parser.add_argument("--seconds", type=float, default=120.0, help="with --kill-every: how long without and how long with kills")
    parser.add_argument("--quick", action="store_true", help="a tiny model, few short samples")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for the run folders and logs of the contenders, which otherwise go at the end")
    parser.add_argument("--out", type=Path, default=Path("build/rl.json"))
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.contender:
        run: Callable[[dict[str, Any], str], None] = trl_contender if options.contender.startswith("trl") else everstep_contender
        run(json.loads(options.settings.read_text()), options.contender)
        return 0
    if options.quick:
        options.shape, options.prompt, options.response, options.prompts, options.samples, options.micro = ["tiny"], 8, 12, 4, 4, 8
        options.iterations, options.warm = min(options.iterations, 2), 1
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, Any] = {"about": circumstances("rl", arguments, ("trl", "vllm")),
                             "settings": {k: v for k, v in vars(options).items() if k not in ("out", "keep", "contender", "settings")}, "limits": link_limits(device)}
    problems = False
    for shape in options.shape:
        with folder_of(options.keep, shape) as folder:
            s = prepare(folder, shape, options, device)
            if options.kill_every:
                found[shape] = row = with_kills(options.contenders[0], s, options.seconds, options.kill_every, options.warm)
                print(f"{shape}, {row['kind']}: {row['samples_per_s']:.2f} samples/s, with {row['kills']} engines killed, one every {row['every_s']:g} s, "
                      f"{row['samples_per_s_with_kills']:.2f} ({row['ratio']:.2f}); broken invariants: {row['broken_invariants'] or 'none'}")
                problems |= bool(row["broken_invariants"])
                continue
            found[shape] = throughput(options.contenders, s, options.iterations, options.warm)
            print(table(shape, found[shape]))
            problems |= any("problem" in row for row in found[shape].values())
    print("this machine: " + ", ".join(f"{name} {value:.1f}" for name, value in found["limits"].items()))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written: {options.out}")
    return int(problems)


if __name__ == "__main__":
    sys.exit(main())
