"""Megatron-Core without an accelerator: redirect the CUDA calls it makes unconditionally.

Megatron-Core computes on whatever device its tensors are, and speaks gloo, but asks ``torch.cuda`` for the current
device, streams, events and random state without checking that there is one, creates small tensors on
``device="cuda"``, and recognises parameters by ``Tensor.type()`` strings that begin with ``torch.cuda.``.

Two parts, because they have different reach:

- ``apply()`` replaces functions of the module ``torch.cuda``, once per process. Without a CUDA device these
  functions could only raise, so nobody else misses them.
- ``redirected()`` is a ``TorchFunctionMode``: it rewrites ``device="cuda"`` arguments of tensor functions. A mode
  belongs to one thread and costs microseconds per call, so the engine enters it only for the duration of its own
  calls. ``enter_thread()`` enters it for the rest of the calling thread's life, for code that calls Megatron-Core
  directly.

Nothing here has any effect when an accelerator exists.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_lock = threading.Lock()
_applied = False
_thread = threading.local()


def needed() -> bool:
    """True on a machine without any accelerator."""
    return not torch.cuda.is_available() and not torch.accelerator.is_available()


class _NoStream:
    """Stands in for CUDA streams and events: the CPU does everything in order, so every wait is over already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    wait_stream = wait_event = wait = record = synchronize = _nothing

    def record_event(self, *args: Any, **kwargs: Any) -> _NoStream:
        return self

    def query(self) -> bool:
        return True

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *exc: Any) -> None:
        pass


def apply() -> None:
    """Redirect ``torch.cuda`` functions to the CPU. Idempotent; does nothing when an accelerator exists."""
    global _applied
    if not needed():
        return
    with _lock:
        if _applied:
            return
        cpu = torch.device("cpu")
        replacements: dict[str, Any] = {
            "current_device": lambda: cpu,
            "set_device": lambda device: None,
            "synchronize": lambda device=None: None,
            "empty_cache": lambda: None,
            "get_rng_state": lambda device="cpu": torch.get_rng_state(),
            "set_rng_state": lambda state, device="cpu": torch.set_rng_state(state),
            "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
            "default_generators": (torch.default_generator,),
            "Stream": _NoStream,
            "Event": _NoStream,
            "current_stream": lambda device=None: _NoStream(),
            "default_stream": lambda device=None: _NoStream(),
            "stream": lambda stream: contextlib.nullcontext(),
        }
        for name, value in replacements.items():
            setattr(torch.cuda, name, value)

        import megatron.core.tensor_parallel.random as megatron_random

        # Megatron reaches below torch.cuda for the random state, through the C extension.
        megatron_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
        # It warns where the CPU's random state changes beside the device's. Here they are one.
        logging.getLogger(megatron_random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())
        megatron_random._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
        _applied = True


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class _CudaToCpu(TorchFunctionMode):
    """Rewrites device arguments that name CUDA, and answers ``Tensor.type()`` as if the tensor were on CUDA."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = torch.device("cpu")
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], torch.device("cpu"), *args[2:])
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return result.replace("torch.", "torch.cuda.", 1)
        return result


@contextlib.contextmanager
def redirected() -> Iterator[None]:
    """Within it, tensor functions of the calling thread that name a CUDA device use the CPU. No-op with CUDA."""
    if not needed() or getattr(_thread, "entered", False):
        yield
        return
    apply()
    _thread.entered = True
    try:
        with _CudaToCpu():
            yield
    finally:
        _thread.entered = False


def enter_thread() -> None:
    """As ``redirected()``, for the rest of the calling thread's life. Idempotent; no-op with CUDA."""
    if not needed() or getattr(_thread, "entered", False):
        return
    apply()
    _thread.entered = True
    _CudaToCpu().__enter__()
