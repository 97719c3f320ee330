"""Write examples/models/tiny-qwen3-sums: the model of examples/sft_chat.yaml, trained until it adds numbers up to 9.

    python examples/models/make_sums.py [FOLDER]

A small pretrained model for examples/lora_sft.yaml. Takes two minutes on two CPU cores; the weights are kept in bfloat16.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import everstep

HERE = Path(__file__).parent


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as runs:
        settings = [f"run_dir={runs}/run", "layout.replicas=1", "sft.steps=400", "launcher=ray", "device=cpu", "model.dtype=float32"]
        if code := everstep.run(everstep.load_config(HERE.parent / "sft_chat.yaml", settings)):
            sys.exit(code)
        (trained,) = Path(runs).glob("run/checkpoints/step-*/hf")
        from transformers import AutoModelForCausalLM, AutoTokenizer

        AutoModelForCausalLM.from_pretrained(trained, dtype="bfloat16").save_pretrained(folder)
        AutoTokenizer.from_pretrained(trained).save_pretrained(folder)
        shutil.copy(HERE / "tiny-qwen3" / "tokenizer_config.json", folder)
    print(f"{folder}: {', '.join(sorted(p.name for p in folder.iterdir()))}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "tiny-qwen3-sums")
