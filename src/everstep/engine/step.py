"""Engine: one replica's model and optimizer, driven by the step transaction in small, separately repeatable acts.

    accumulate -> gradients -> (the link sums them over replicas) -> squared_norm -> apply

The engine knows nothing of replicas, epochs or commits. Nothing is averaged here: gradients, losses and metrics are
sums, and the divisor arrives with ``apply``. Legend: B samples, T token columns.

All methods but ``state``, ``logical_state``, ``state_scalars``, ``load_scalars``, ``state_hash``, ``offload_to_cpu``, ``backload_to_gpu`` and
``close`` are collective over the replica. A collective that fails because a peer is gone raises ReplicaBroken; the caller then closes the engine.
Waits inside Megatron end with the timeout of the process groups, or when a neighbour closes its sockets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor

from everstep.config import derive
from everstep.engine import cpu, groups, hf, lora
from everstep.engine import state as rank_state
from everstep.engine.arrange import Grid, Packed
from everstep.engine.columns import Columns
from everstep.engine.determinism import set_determinism
from everstep.engine.logical import LogicalState
from everstep.engine.loss import LossFn, pack_sums
from everstep.engine.model import (
    build_chunks,
    check_layout,
    in_model_precision,
    output_weight,
    rank_parameters,
    read_architecture,
    transformer_config,
    wrap_for_training,
)
from everstep.engine.moe import SideState, routing_metrics, token_shares, weight_of
from everstep.engine.offload import PARTS, Part, Residence
from everstep.engine.projection import projected_logprobs
from everstep.engine.schedule import Finish, no_tokens, run_micro_batches
from everstep.engine.source import ModelSource, weights
from everstep.engine.vocab import token_logprobs
from everstep.errors import EverstepError, ReplicaBroken, WorkerFailed

if TYPE_CHECKING:
    from everstep.cluster.batch import TrainingBatch
    from everstep.config.schema import Config
    from everstep.layout import Layout, Position

P = ParamSpec("P")
R = TypeVar("R")

#: What a method that ``_inside`` wraps needs on the device; those not named need everything.
_NEEDS: dict[str, tuple[Part, ...]] = {
    "_next": ("parameters",),
    "keep_reference": ("parameters",),
    "accumulate": ("parameters", "gradients"),
    "squared_norm": (),
    "stepped": ("parameters", "optimizer"),
    "gather_parameters": ("parameters", "optimizer"),
    "logprobs": (),  # see there
    "values": ("parameters",),
}


def _inside(method: Callable[Concatenate[Engine, P], R]) -> Callable[Concatenate[Engine, P], R]:
    """Run a method with what it needs on the device, CUDA calls redirected (CPU only) and failed collectives reported as
    ReplicaBroken."""

    @functools.wraps(method)
    def wrapped(self: Engine, *args: P.args, **kwargs: P.kwargs) -> R:
        self._must_be_open()
        try:
            with cpu.redirected():
                self._residence.backload(_NEEDS.get(method.__name__, PARTS))
                result = method(self, *args, **kwargs)
            if self._aborted or (self._beside is not None and self._beside._aborted):  # NCCL work reports success after an abort
                raise ReplicaBroken("the replica's groups were aborted")
            return result
        except Exception as error:  # of whatever library: is a peer gone?
            broken = groups.broken_replica(error)
            if broken is None:
                raise
            groups.forget_frames(error)
        raise broken

    return wrapped


class Engine:
    """The model, its optimizer and, after ``keep_reference``, a frozen reference model, as one rank holds them.

    ``torch.distributed`` must already be the replica's world, with ``layout.ranks_per_replica`` ranks. The weights
    are undefined until ``load_pretrained``, ``init_random`` or a copy into ``state()``.
    """

    def __init__(
        self, config: Config, hf_config: Any, position: Position, layout: Layout, device: torch.device,
        head: Literal["vocabulary", "value"] = "vocabulary", beside: Engine | None = None,
    ) -> None:  # fmt: skip
        """``head``: ``value`` makes a critic, whose output is one number per token (see ``values``).

        ``beside``: another engine of this process, of the same layout, whose process groups this one shares (an actor and its
        critic). All ranks must then call the two in the same order. The other one closes the groups, and is to be closed last.
        """
        self.config, self.position, self.layout, self.device = config, position, layout, device
        self.arch = dataclasses.replace(read_architecture(hf_config, config.moe.aux_loss_coef), value_head=head == "value")
        check_layout(self.arch, layout, config.engine.sequence_parallel)
        self._table = hf.pieces(self.arch, layout)
        self._adapters = lora.pieces(self._table, config, layout)  # empty without LoRA
        self._frozen_digest: str | None = None
        self._deferred = config.engine.logprob_chunk_tokens > 0  # logits are computed chunk by chunk, outside the model
        self._fused = derive.fused_kernels(config.engine, cuda=device.type == "cuda")
        self._closed = self._aborted = False
        self._beside = beside
        if beside is not None and (beside.layout != layout or beside.position != position):
            raise EverstepError(f"an engine at {position} of {layout} cannot share the groups of one at {beside.position} of {beside.layout}")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        set_determinism(config.engine.deterministic, device)
        try:
            with cpu.redirected():
                if beside is None:
                    groups.open_groups(layout)
                else:
                    beside._must_be_open()
                # Before the model: Megatron's tracker must exist when layers with dropout are built.
                model_parallel_cuda_manual_seed(config.seed % 2**31)
                self._megatron = transformer_config(self.arch, config, layout)
                self._megatron.finalize_model_grads_func = _finalize_sums
                self._columns = Columns.of_this_rank(config.engine.sequence_parallel)
                chunks = build_chunks(self.arch, self._megatron, layout, self._deferred, self._fused)
                if self._adapters:
                    lora.attach(chunks, self._table, self.arch, self._megatron, config, layout)
                self._ddps, self._optimizer = wrap_for_training(chunks, self._megatron, config, fused=self._fused)
                self._slots = rank_state.adam_slots(self._ddps, self._optimizer)
                experts = self.arch.experts
                self._side = SideState(self._ddps, experts.sparse, experts.count, layout) if experts else None
                self._counted = rank_state.counted_ranges(self._ddps, self._table + self._adapters)
                self._counted_names = rank_state.counted_names(self._ddps, self._table + self._adapters)
                self._residence = Residence(
                    {
                        "parameters": functools.partial(rank_state.parameter_memory, self._ddps),
                        "gradients": functools.partial(rank_state.gradient_memory, self._ddps),
                        "optimizer": functools.partial(rank_state.optimizer_memory, self._slots),
                    },
                    device,
                )
        except Exception as error:  # as above
            broken = groups.broken_replica(error)
            if broken is None:
                raise
            groups.forget_frames(error)
        else:
            self._reference: rank_state.ReferenceCopy | lora.AdapterReference | None = None
            return
        self.close()
        raise broken

    # ------------------------------------------------------------------ weights

    @_inside
    def load_pretrained(
        self, source: ModelSource | str | Path | Mapping[str, Tensor | hf.Getter]
    ) -> None:
        """Take the weights of ``source``: a resolved model, a directory with safetensors, or a Hugging Face state
        dict (name -> tensor, or function that returns it).

        Each rank reads the whole of one parameter at a time and keeps its shard. BadInput names a missing or
        misshapen tensor. Adam's moments and step are not touched. Adapters, and a value head, are new ones of
        ``config.seed`` unless the state dict has them (``export_adapter`` and ``export_hf`` name them).
        """
        if isinstance(source, Mapping):
            origin = "the state dict"
            getters: Mapping[str, hf.Getter] = hf.getters(source)
        else:
            if not isinstance(source, ModelSource):
                source = ModelSource(str(source), Path(source))
            origin = source.spec
            getters = weights(source)
        self._load(getters, origin, self.config.seed)

    @_inside
    def init_random(self, seed: int) -> None:
        """Weights of a new model, as transformers initialises them, and new adapters; the same for every layout."""
        self._load(hf.random_weights(self._table, self.arch, seed), f"random weights of seed {seed}", seed)

    def _load(self, getters: Mapping[str, hf.Getter], origin: str, seed: int) -> None:
        if self.arch.tied and "model.embed_tokens.weight" not in getters and "lm_head.weight" in getters:
            getters = {**getters, "model.embed_tokens.weight": getters["lm_head.weight"]}
        new = lora.initial(self._adapters, seed)
        if self.arch.value_head:  # a language model has none
            drawn = hf.random_weights(self._table, self.arch, seed)
            new |= {name: drawn[name] for name in ("score.weight", "score.bias")}
        getters = {**new, **getters}
        hf.load(rank_parameters(self._ddps), self._table + self._adapters, getters, self.arch, origin)
        self._optimizer.reload_model_params()
        if self._adapters:
            self._frozen_digest = lora.frozen_digest(self._ddps)

    def export_hf(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) of the current weights, on every rank, one at a time, as copies.

        Adapters are merged into the weights. Collective: all ranks of the replica must exhaust the iterator.
        """
        weights = lora.Merged(self._ddps) if self._adapters else rank_parameters(self._ddps)
        return self._each(hf.export(weights, self._table, self.arch))

    def export_frozen(self) -> Iterator[tuple[str, Tensor]]:
        """As ``export_hf``, without what adapters add."""
        return self._each(hf.export(lora.without_adapters(self._ddps), self._table, self.arch))

    def export_adapter(self) -> Iterator[tuple[str, Tensor]]:
        """The adapters alone, as ``export_hf``; named ``MODULE.lora_A.weight`` and ``MODULE.lora_B.weight``."""
        return self._each(hf.export(rank_parameters(self._ddps), self._adapters, self.arch))

    def _each(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        while (item := self._next(tensors)) is not None:
            yield item

    @_inside
    def _next(self, tensors: Iterator[tuple[str, Tensor]]) -> tuple[str, Tensor] | None:
        return next(tensors, None)

    @_inside
    def keep_reference(self) -> None:
        """Keep the current weights as the reference model. It is never trained; it becomes part of ``state()``.

        With LoRA it shares the frozen weights, and only the adapters are copied (new ones compute nothing).
        """
        if self._reference is not None:
            self._reference.keep()
        elif self._adapters:
            self._reference = lora.AdapterReference(self._ddps)
        else:
            chunks = build_chunks(self.arch, self._megatron, self.layout, self._deferred, self._fused)
            frozen = [in_model_precision(c.requires_grad_(False), self._megatron).eval() for c in chunks]
            host_of = self.device if self.config.engine.offload.reference else None
            self._reference = rank_state.ReferenceCopy(frozen, self._ddps, host_of)

    # ------------------------------------------------------------------ gradients

    @_inside
    def accumulate(
        self, micro_batches: list[TrainingBatch], loss: LossFn, seeds: list[int], temperature: float = 1.0
    ) -> Tensor:
        """Gradients of the sum of ``loss`` over ``micro_batches``, into zeroed buffers.

        One forward-backward over all micro-batches, one finalisation. All ranks of one data-parallel coordinate must
        be given the same micro-batches; their widths and sizes may differ. An empty list contributes zeros.

        ``seeds[i]``: seed of every random number drawn in micro-batch i. ``temperature``: the logits are divided by
        it. With a value head ``loss`` is given ``values`` in the place of log-probabilities, and no entropy.

        Returns the float64 vector ``[weight, loss_sum, metric sums..., metric weights..., side state...]`` (on the CPU) summed over
        the replica, equal on all of its ranks; side state is ``everstep.engine.moe.SideState``'s, for a model with experts. After an error the buffers hold garbage; the next call zeroes them.
        """
        if len(seeds) != len(micro_batches):
            raise EverstepError(f"{len(micro_batches)} micro-batches but {len(seeds)} seeds; give one seed each")
        self._residence.gradients_spent = False
        for ddp in self._ddps:
            ddp.zero_grad_buffer()
            ddp.train()
        self._optimizer.zero_grad()
        names, weigh = tuple(loss.metric_names), weight_of(loss, self.arch.experts.aux_loss_coef if self.arch.experts else 0.0)
        total = torch.zeros(2 + 2 * len(names), dtype=torch.float64, device=self.device)

        def loss_of(arranged: Grid | Packed, last: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            entropy = None
            if self.arch.value_head:
                outputs = _token_values(last, arranged)
            else:
                outputs, entropy = self._token_logprobs(self._ddps, last, arranged, temperature, loss.needs_entropy)
            batch = arranged.batch
            assert batch is not None
            output = loss(outputs, entropy, batch)
            if weigh is not None and float(output.weight) != float(weigh(batch)):
                raise WorkerFailed(f"the loss weighed a micro-batch {float(output.weight)}, its weight() says {float(weigh(batch))}")
            loss_sum = output.loss_sum
            if not loss_sum.requires_grad:  # a loss without any counted token: backward must still run on all stages
                loss_sum = loss_sum + 0.0 * outputs.sum()
            return loss_sum, no_tokens(self.device), {"sums": pack_sums(output, names, self.device)}

        shares: Callable[[TrainingBatch], Tensor] | None = None
        if self._side is not None:
            self._side.forget()
            shares = lambda batch: token_shares(batch["attention_mask"], weigh(batch) if weigh is not None else 0.0)
        if (count := self._in_step(len(micro_batches))):
            results = self._run(self._ddps, micro_batches, seeds, loss_of, forward_only=False, count=count, shares=shares)
            for result in results:
                if result:  # nothing from a micro-batch without samples
                    total += result["sums"]
        else:
            _finalize_sums(list(self._ddps), None)
        own = total if self._answers() else torch.zeros_like(total)
        if self._side is not None:
            own = torch.cat([own, self._side.sums(self.device)])
        return groups.sum_over_replica(own)

    def no_sums(self, loss: LossFn) -> Tensor:
        """What ``accumulate`` returns of no micro-batch: zeros."""
        return torch.zeros(2 + 2 * len(loss.metric_names) + (self._side.width if self._side else 0), dtype=torch.float64)

    def gradients(self) -> list[Tensor]:
        """Flat float32 views of the raw gradient sums that this rank's optimizer owns. Padding elements are zero.

        With the distributed optimizer this is the rank's shard, else everything. ``apply`` overwrites them.
        """
        self._must_be_open()
        self._residence.backload(("gradients",))
        return rank_state.gradient_shards(self._ddps)

    def read_sums(self, sums: list[float]) -> tuple[list[float], dict[str, float]]:
        """Sums of a committed step, as ``accumulate`` returns them -> those of the loss, and the metrics that side state makes."""
        experts = self.arch.experts
        if self._side is None or experts is None:
            return sums, {}
        cut = len(sums) - self._side.width
        return sums[:cut], routing_metrics(sums[cut:], experts.count, experts.aux_loss_coef, sums[0])

    @_inside
    def squared_norm(self, totals: Sequence[Tensor], names: Sequence[str] | None = None) -> float:
        """Squared L2 norm over the replica of tensors shaped like ``gradients()``, or like those of ``stepped()`` with these ``names``.

        Every parameter counts once, whatever the layout. Bitwise equal on all ranks of the replica, and on all replicas with equal
        totals. Not finite if a number is not.
        """
        own = torch.zeros((), dtype=torch.float64, device=self.device)
        counted = self._counted if names is None else [[(0, t.numel())] * (n in self._counted_names) for n, t in zip(names, totals, strict=True)]
        for total, ranges in zip(totals, counted, strict=True):
            for start, end in ranges:
                own += torch.linalg.vector_norm(total.view(-1)[start:end], dtype=torch.float64).square()
        return float(groups.sum_over_replica(own.reshape(1)))

    @_inside
    def apply(self, totals: list[Tensor], scale: float, lr: float) -> None:
        """One AdamW step with gradient ``totals * scale``; ``totals`` (shaped like ``gradients()``) is only read.

        Local arithmetic, then, with the distributed optimizer, the gather of parameters over the inner data-parallel
        ranks; if that gather breaks, ``gather_parameters`` repeats it.
        """
        with torch.no_grad():
            for gradient, total in zip(self.gradients(), totals, strict=True):
                torch.mul(total, scale, out=gradient)
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
        self._optimizer.prepare_grads()
        self._optimizer.step_with_ready_grads()
        self._optimizer.zero_grad()
        self._residence.gradients_spent = True

    @_inside
    def gather_parameters(self) -> None:
        """Rebuild the parameters from the ranks' master shards: the collective half of ``apply``, repeatable."""
        for inner in self._optimizer.chained_optimizers:
            if hasattr(inner, "_copy_main_params_to_model_params"):
                inner._copy_main_params_to_model_params()
        for ddp in self._ddps:
            if ddp.ddp_config.use_distributed_optimizer:
                ddp.start_param_sync(force_sync=True)

    @_inside
    def stepped(self) -> dict[str, Tensor]:
        """name -> float32 view of what this rank's optimizer steps (its masters or parameters); ``gather_parameters`` after writing."""
        return rank_state.stepped(self._slots)

    def inside_stepped(self) -> dict[str, tuple[str, ...]]:
        """name in ``stepped`` -> transformers' names of the tensors in it."""
        self._must_be_open()
        return rank_state.names_inside(self._slots, self._table + self._adapters)

    # ------------------------------------------------------------------ log-probabilities

    @_inside
    def logprobs(
        self,
        micro_batches: list[TrainingBatch],
        temperature: float = 1.0,
        model: Literal["policy", "reference"] = "policy",
    ) -> list[Tensor] | None:
        """Log-probabilities of the tokens, float32 (B, T) per micro-batch, column 0 zero; no gradient, no dropout.

        On ranks that collect (last pipeline stage, tensor- and context-parallel rank 0); None elsewhere.
        """
        if model not in ("policy", "reference"):
            raise EverstepError(f"model={model!r} must be 'policy' or 'reference'")
        if model == "reference" and self._reference is None:
            raise EverstepError("there is no reference model; call keep_reference() first")
        if self.arch.value_head:
            raise EverstepError("this engine has a value head, which gives no log-probabilities; call values()")
        if model == "policy" or self._adapters:
            self._residence.backload(("parameters",))
        serving = self._reference.serving() if model == "reference" and self._reference else contextlib.nullcontext(self._ddps)
        with serving as chunks:
            return self._evaluate(chunks, micro_batches, lambda at, last: self._token_logprobs(chunks, last, at, temperature, False)[0])

    @_inside
    def values(self, micro_batches: list[TrainingBatch]) -> list[Tensor] | None:
        """What the value head says, float32 (B, T) per micro-batch, no gradient, no dropout; as ``logprobs`` on collecting ranks.

        Column t is the value of the state in which token t is chosen: from the tokens before it. Column 0 is zero.
        """
        if not self.arch.value_head:
            raise EverstepError('this engine has no value head; build it with head="value"')
        return self._evaluate(self._ddps, micro_batches, lambda at, last: _token_values(last, at))

    def _evaluate(
        self, chunks: Sequence[torch.nn.Module], micro_batches: list[TrainingBatch], per_token: Callable[[Grid | Packed, Tensor], Tensor]
    ) -> list[Tensor] | None:
        def collect(arranged: Grid | Packed, last: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            values = per_token(arranged, last)
            return values.sum(), no_tokens(self.device), {"values": values}

        for chunk in chunks:
            chunk.eval()
        results: list[dict[str, Tensor]] = []
        if (count := self._in_step(len(micro_batches))):
            with torch.no_grad():
                results = self._run(chunks, micro_batches, [0] * len(micro_batches), collect, forward_only=True, count=count)
        if not self._answers():
            return None
        nothing = [torch.zeros(batch.tensors["input_ids"].shape, device=self.device) for batch in micro_batches if not len(batch)]
        return [result["values"] if result else nothing.pop(0) for result in results]

    # ------------------------------------------------------------------ state

    def state(self, frozen: bool = True) -> dict[str, Tensor]:
        """Views of all tensors that make this rank's state, in a fixed order; writing into them restores the state.

        See ``everstep.engine.state.state_views`` for the names. Adam's step counter is in ``state_scalars``. ``frozen=False``
        leaves out what LoRA never trains, which a rank can have from model.path.

        Of what is offloaded the views are on the host, and nothing is brought back for them. They are good until that part moves:
        ask again after ``offload_to_cpu``, and after any method that needs it on the device.
        """
        self._must_be_open()
        kept = self._reference.tensors() if self._reference is not None else {}
        with self._residence.lock:
            views = rank_state.state_views(self._ddps, self._slots, kept, frozen)
            return {name: self._residence.view(tensor) for name, tensor in views.items()}

    def logical_state(self, views: Mapping[str, Tensor] | None = None, kinds: Sequence[str] | None = None) -> Callable[[], LogicalState]:
        """``views`` (None: ``state(frozen=False)``) as parts of whole tensors; any thread may call it. ``kinds``: of each trained parameter."""
        views, kinds = views or self.state(frozen=False), kinds or ["param", *["master"] * self._megatron.bf16, "exp_avg", "exp_avg_sq"]
        made_of = self._slots, self._table, self._adapters, self.arch, self.config.engine.distributed_optimizer
        return rank_state.logical(views, kinds, *made_of)

    def state_scalars(self) -> dict[str, Any]:
        """What is no tensor: ``adam_step``, whether there is a reference model; with LoRA its scale and the frozen weights' digest."""
        self._must_be_open()
        scalars: dict[str, Any] = {"adam_step": rank_state.adam_step(self._slots), "has_reference": self._reference is not None}
        if self._adapters:
            scalars |= {"lora_alpha": self.config.lora.alpha, "frozen_digest": self._frozen_digest}
        return scalars

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """The inverse of ``state_scalars``. Call it before writing into ``state()``: it makes a missing reference.

        BadInput if the adapters belong to another base than the one loaded here, or have another scale. An engine whose
        weights are undefined takes the digest over: the frozen weights must then come with the state.
        """
        self._must_be_open()
        if self._adapters:
            lora.check_same_base(scalars, self.config, self._frozen_digest)
            self._frozen_digest = scalars["frozen_digest"]
        rank_state.set_adam_step(self._slots, int(scalars["adam_step"]))
        if scalars["has_reference"] and self._reference is None:
            self.keep_reference()
        elif not scalars["has_reference"]:
            self._reference = None

    def state_hash(self) -> str:
        """SHA-256 over ``state()`` and ``state_scalars()`` of this rank. Equal positions of replicas must agree."""
        return rank_state.hash_state(self.state(), self.state_scalars())

    # ------------------------------------------------------------------ memory

    def offload_to_cpu(self, parameters: bool = True, gradients: bool = True, optimizer: bool = True) -> dict[Part, int]:
        """Move these parts to host memory (page-locked where there is a GPU) and free theirs on the device. Local.

        Returns the bytes freed, by part; 0 for what is there already. Nobody else may be reading views from ``state()`` or
        ``gradients()`` meanwhile, or read them afterwards. Every method brings back by itself what it needs; gradients that
        ``apply`` has consumed come back as zeros, everything else bit by bit. ``optimizer``: moments and float32 masters; without
        masters (model.dtype=float32) parameters and what the optimizer updates are one. A reference model with weights of its own
        is not meant here: see engine.offload.reference.
        """
        self._must_be_open()
        wanted = zip(PARTS, (parameters, gradients, optimizer), strict=True)
        return self._residence.offload([part for part, moves in wanted if moves])

    def backload_to_gpu(self, parameters: bool = True, gradients: bool = True, optimizer: bool = True) -> dict[Part, int]:
        """The inverse of ``offload_to_cpu``; returns the bytes taken on the device, by part. Local.

        torch.OutOfMemoryError if the device has no room: nothing is lost, and it can be called again.
        """
        self._must_be_open()
        wanted = zip(PARTS, (parameters, gradients, optimizer), strict=True)
        return self._residence.backload([part for part, moves in wanted if moves])

    def abort(self) -> None:
        """For another thread, once a peer is dead: end the collectives in which the engine's thread waits.

        The waiting method raises ReplicaBroken, and ``close`` is then safe. Only NCCL needs this; gloo ends when sockets close."""
        self._aborted = True
        groups.abort_groups()

    def close(self) -> None:
        """Drop the model and every process group of the replica, its world included. Idempotent; talks to nobody.

        On gloo this closes the sockets, which is how ranks that still wait for this one learn that it left. Views from ``state()`` and
        ``gradients()`` keep their memory, not the groups. An engine ``beside`` another one leaves the groups to that one.
        """
        if self._closed:
            return
        self._closed = True
        for name in ("_ddps", "_optimizer", "_slots", "_reference", "_megatron", "_columns", "_residence"):
            self.__dict__.pop(name, None)
        if self._beside is None:
            groups.close_groups()
        else:
            groups.give_memory_back()

    # ------------------------------------------------------------------ inside

    def _must_be_open(self) -> None:
        if self._closed or (self._beside is not None and self._beside._closed):
            raise EverstepError("this engine is closed; build a new one")

    def _answers(self) -> bool:
        """Whether this rank speaks for its data-parallel coordinate (``Layout.collect_ranks``)."""
        first = mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0
        return first and mpu.is_pipeline_last_stage()

    def _token_logprobs(
        self, chunks: Sequence[torch.nn.Module], last: Tensor, arranged: Grid | Packed, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T) log-probabilities and entropies, aligned with the tokens they belong to, from this rank's columns of what the
        model gives: logits, or hidden states that are still to be projected."""
        weight = output_weight(chunks) if self._deferred else None
        columns = last.shape[-1] if weight is None else len(weight)
        first = mpu.get_tensor_model_parallel_rank() * columns
        how: dict[str, Any] = {
            "targets": arranged.targets(),
            "first": first,
            "valid": min(columns, self.arch.vocab - first),
            "temperature": temperature,
            "with_entropy": with_entropy,
            "group": mpu.get_tensor_model_parallel_group() if self.layout.tp > 1 else None,
        }
        if weight is None:
            logprobs, entropy = token_logprobs(last, fused="logprobs" in self._fused, **how)
        else:
            engine = self.config.engine
            logprobs, entropy = projected_logprobs(
                last, weight, chunk=engine.logprob_chunk_tokens, sequence_parallel=engine.sequence_parallel, **how
            )
        return arranged.at_targets(logprobs), None if entropy is None else arranged.at_targets(entropy)

    def _run(
        self,
        chunks: Sequence[torch.nn.Module],
        micro_batches: list[TrainingBatch],
        seeds: list[int],
        finish: Finish,
        forward_only: bool,
        count: int,
        shares: Callable[[TrainingBatch], Tensor] | None = None,
    ) -> list[dict[str, Tensor]]:
        return run_micro_batches(
            chunks, self._megatron, self.layout, self._columns, micro_batches, seeds, finish, forward_only, self.device,
            packed=self.config.train.tokens_per_micro_batch is not None, count=count, shares=shares,
        )

    def _in_step(self, micro_batches: int) -> int:
        """How many micro-batches this rank must run: ranks that exchange tokens take part in each other's."""
        if self.layout.ep == 1:
            return micro_batches
        most = torch.tensor(micro_batches, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=mpu.get_expert_model_parallel_group())
        return int(most)


def _token_values(outputs: Tensor, arranged: Grid | Packed) -> Tensor:
    """(B, T) values of the states before each token, from this rank's columns of the head's outputs (..., S, 1)."""
    return arranged.at_targets(outputs[..., 0].float())


def _finalize_sums(model: list[torch.nn.Module], num_tokens: Tensor | None, **kwargs: Any) -> None:
    """Megatron's finalisation without its division by tokens: gradients stay raw sums."""
    finalize_model_grads(model, None, **kwargs)
