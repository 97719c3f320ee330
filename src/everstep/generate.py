"""``everstep generate``: a completion from a checkpoint, a run, or any model that ``model.path`` takes; with transformers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from everstep.config.schema import ModelConfig
from everstep.errors import BadInput, first_line


def find_model(where: str) -> tuple[str, str]:
    """(model.path, words for the user) of a checkpoint folder, a run folder, or a model. ``BadInput``.

    Of a run the newest complete checkpoint is taken.
    """
    folder = Path(where).expanduser()
    if (folder / "hf").is_dir() or (folder / "manifest.json").is_file():
        return str(_exported(folder)), f"checkpoint {folder}"
    if (folder / "checkpoints").is_dir() or (folder / "configs").is_dir():
        from everstep.checkpoint.choose import choose
        from everstep.run_dir import checkpoints_in

        chosen = choose(checkpoints_in(folder), "auto")
        if chosen.path is None:
            reasons = "; ".join(f"{path.name}: {reason}" for path, reason in chosen.skipped)
            raise BadInput(f"the run {where} has no complete checkpoint" + (f" ({reasons})" if reasons else ""))
        return str(_exported(chosen.path)), f"checkpoint {chosen.path}"
    return where, f"model {where}"


def _exported(checkpoint: Path) -> Path:
    """The checkpoint's model as transformers loads it. ``BadInput``."""
    from everstep.checkpoint.storage import is_local

    if not is_local(checkpoint) or not (checkpoint / "hf" / "config.json").is_file():
        raise BadInput(f"{checkpoint}: has no model for transformers here; make one with: everstep export {checkpoint} OUT")
    return checkpoint / "hf"


def generate(where: str, prompt: str, max_tokens: int, temperature: float, seed: int, out: Any) -> int:
    """Write a completion of ``prompt`` to the text stream ``out`` while it is made. Returns the number of tokens.

    ``temperature`` 0 is greedy. A tokenizer with a chat template gets the prompt as a user's message.
    """
    if max_tokens < 1:
        raise BadInput(f"--max-tokens is {max_tokens}; it must be at least 1")
    if not math.isfinite(temperature) or temperature < 0:
        raise BadInput(f"--temperature is {temperature}; it must be 0 (greedy) or more")
    path, words = find_model(where)
    if not prompt:
        raise BadInput("the prompt is empty; give some text to go on from")

    import torch
    import transformers
    from transformers import AutoModelForCausalLM, TextStreamer

    from everstep.engine.source import load_tokenizer, resolve

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model_config = ModelConfig(path=path)
    source = resolve(model_config)
    tokenizer: Any = load_tokenizer(model_config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(source.dir, config=source.hf_config, dtype="auto")
        model = model.to(device)
    except (OSError, ValueError, RuntimeError) as e:
        raise BadInput(f"transformers cannot load the {words}: {first_line(e)}") from e

    if tokenizer.chat_template:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    ids = inputs["input_ids"].to(device)
    if ids.shape[1] == 0:
        raise BadInput("the tokenizer makes no token of the prompt; give some text to go on from")
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit and ids.shape[1] + max_tokens > limit:
        raise BadInput(f"{ids.shape[1]} tokens of prompt and --max-tokens={max_tokens} exceed the model's {limit} positions")

    class Stream(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            out.write(text + ("\n" if stream_end else ""))
            out.flush()

    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
    torch.manual_seed(seed)
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        pad_token_id=tokenizer.pad_token_id,
        streamer=Stream(tokenizer, skip_prompt=True, skip_special_tokens=True),
        **sampling,
    )
    return int(made.shape[1] - ids.shape[1])
