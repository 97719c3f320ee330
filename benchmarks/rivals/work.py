"""The work of a step, for rivals: forward and backward of a rank's samples, and one flat gradient to be summed."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

SHAPES = Path(__file__).parents[1] / "shapes"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen3-small")
    parser.add_argument("--samples", type=int, default=8, help="of each rank")
    parser.add_argument("--micro", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--log", required=True)
    parser.add_argument("--number", type=int, default=0, help="of this process")
    parser.add_argument("--active", type=int, default=3, help="ranks that work; others are spares")
    parser.add_argument("--address", default="")
    return parser.parse_args()


class Work:
    """One rank's model, optimizer and data. ``step``: optimizer steps that were made."""

    def __init__(self, args: argparse.Namespace):
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        torch.manual_seed(0)
        large = args.device == "cuda"
        if large:
            torch.cuda.set_device(args.number % torch.cuda.device_count())
        self.device = torch.device("cuda", torch.cuda.current_device()) if large else torch.device("cpu")
        config = AutoConfig.from_pretrained(SHAPES / args.shape)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if large else torch.float32).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.vocabulary, self.args, self.step = config.vocab_size, args, 0
        self.flat = torch.zeros(sum(p.numel() for p in self.model.parameters()), dtype=torch.float32 if not large else torch.bfloat16, device=self.device)
        at = 0
        for parameter in self.model.parameters():  # gradients are views of one buffer: one collective sums them
            parameter.grad = self.flat[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()

    def backward(self, rank: int) -> None:
        self.flat.zero_()
        generator = torch.Generator().manual_seed(self.step * 1000 + rank)
        for _ in range(self.args.samples // self.args.micro):
            tokens = torch.randint(0, self.vocabulary, (self.args.micro, self.args.tokens), generator=generator).to(self.device)
            self.model(input_ids=tokens, labels=tokens).loss.backward()

    def apply(self) -> None:
        self.optimizer.step()
        self.step += 1

    def state(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}

    def load(self, state: dict[str, object]) -> None:
        self.model.load_state_dict(state["model"])  # type: ignore[arg-type]
        self.optimizer.load_state_dict(state["optimizer"])  # type: ignore[arg-type]
        self.step = int(state["step"])  # type: ignore[call-overload]
