"""Who runs a step: plain PyTorch on one device, or DeepSpeed across workers. Same numbers.

An engine owns the optimizer. Losses are of the global batch, so `backward` undoes the division
by the number of workers that data-parallel averaging applies (each worker's gradient is that of
its own rows; their *sum* is the gradient of the global loss).
"""

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stages.encoder.model import Encoder
from stages.train.auxiliary import all_reduced
from stages.train.settings import TrainSettings
from stages.train.state import MOMENTS, State, adamw_of, copied, set_adamw, tensors_of
from stages.train.student import Student, Sums


class Engine(Protocol):
    """Runs the forward passes and the optimizer of one worker. Every method is called by all
    workers, in the same order.

    forward: vectors (b, D) float32 of the own rows, and in training sums of auxiliary losses: see
        `Student.forward`.
    step: from the loss of the global batch, as every worker has it; the gradient's norm before
        clipping.
    snapshot: the whole state as it is now; None for all but the first worker.
    encoder_weights: the encoder's whole weights by name, on the CPU.
    gather_rows: own rows (b, D) to all workers' (B, D), in rank order; only the own ones carry
        gradient.
    sum_over_workers: as another tensor, or the same where there is one worker; no gradient.
    layout: engine and number of workers, as a checkpoint says them.
    """

    student: Student
    rank: int
    num_workers: int

    def forward(
        self,
        ids_BL: Tensor,
        mask_BL: Tensor,
        masked: dict[str, tuple[Tensor, Tensor]],
        factors: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Sums]: ...
    def step(self, loss: Tensor, learning_rate: float) -> Tensor: ...
    def snapshot(self) -> State | None: ...
    def load(self, state: State) -> None: ...
    def encoder_weights(self) -> dict[str, Tensor]: ...
    def gather_rows(self, rows: Tensor) -> Tensor: ...
    def sum_over_workers(self, x: Tensor) -> Tensor: ...
    def barrier(self) -> None: ...
    def layout(self) -> dict[str, Any]: ...


class PlainEngine:
    """One device, no process group."""

    rank = 0
    num_workers = 1

    def __init__(self, student: Student, settings: TrainSettings) -> None:
        self.student = student
        self._settings = settings
        self._parameters = [p for p in student.parameters() if p.requires_grad]
        self.optimizer = adamw(self._parameters, settings)

    def forward(
        self,
        ids_BL: Tensor,
        mask_BL: Tensor,
        masked: dict[str, tuple[Tensor, Tensor]],
        factors: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Sums]:
        vectors, sums = self.student(ids_BL, mask_BL, masked, factors)
        return vectors, sums

    def step(self, loss: Tensor, learning_rate: float) -> Tensor:
        """Backward, clip, update. Returns the gradient norm before clipping, on the device."""
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._settings.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def snapshot(self) -> State:
        weights = {name: copied(tensor) for name, tensor in tensors_of(self.student).items()}
        return State(weights, adamw_of(self.optimizer, self._parameters))

    def load(self, state: State) -> None:
        with torch.no_grad():
            for name, tensor in tensors_of(self.student).items():
                tensor.copy_(state.weights[name])
        set_adamw(self.optimizer, self._parameters, state.adamw)

    def encoder_weights(self) -> dict[str, Tensor]:
        return cpu_copy(self.student.encoder)

    def gather_rows(self, rows: Tensor) -> Tensor:
        return rows

    def sum_over_workers(self, x: Tensor) -> Tensor:
        return x

    def barrier(self) -> None:
        return

    def layout(self) -> dict[str, Any]:
        return {"engine": "plain", "workers": 1}


class DeepSpeedEngine:
    """ZeRO stages 0 to 3 in an initialised torch.distributed process group."""

    def __init__(self, student: Student, settings: TrainSettings) -> None:
        import deepspeed

        self.rank = dist.get_rank()
        self.num_workers = dist.get_world_size()
        self.student = student
        self._stage = settings.zero_stage
        self._parameters = parameters = [p for p in student.parameters() if p.requires_grad]
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=student,
            optimizer=adamw(parameters, settings),
            dist_init_required=False,
            config={
                "train_batch_size": settings.batch_size,
                "train_micro_batch_size_per_gpu": settings.batch_size // self.num_workers,
                "gradient_clipping": settings.clip_norm,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {
                    "stage": settings.zero_stage,
                    "stage3_gather_16bit_weights_on_model_save": True,
                },
                "steps_per_print": 10**9,
                "wall_clock_breakdown": False,
            },
        )

    def forward(
        self,
        ids_BL: Tensor,
        mask_BL: Tensor,
        masked: dict[str, tuple[Tensor, Tensor]],
        factors: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Sums]:
        vectors, sums = self._engine(ids_BL, mask_BL, masked, factors)
        return vectors, sums

    def step(self, loss: Tensor, learning_rate: float) -> Tensor:
        """As PlainEngine.step. DeepSpeed averages gradients over workers; the sum is wanted."""
        self._engine.backward(loss * self.num_workers)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        if self._stage == 0:  # DeepSpeed clips here too, but does not say by how much
            gradients = [p.grad for p in self.student.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            self._engine.step()
            return norm
        self._engine.step()
        return torch.as_tensor(self._engine.get_global_grad_norm())

    def snapshot(self) -> State | None:
        state = State({}, {})
        for name, tensor in tensors_of(self.student).items():
            with self._whole(tensor):
                if self.rank == 0:
                    state.weights[name] = copied(tensor)
        if self._stage == 0 and self.rank == 0:
            state.adamw.update(adamw_of(self._optimizer, self._parameters))
        elif self._stage > 0 and self._adamw.state:  # there from the first step on
            from deepspeed.utils import safe_get_full_optimizer_state as get

            if self._stage < 3:
                # DeepSpeed (0.19.8) looks for the moments once the first parameter group has moved,
                # and leaves those of the second, that without weight decay, unfound
                self._optimizer._hp_optimizer_states_linked = False
                self._optimizer._lazy_init_hp_params_optimizer_state()
            step = next(iter(self._adamw.state.values()))["step"]
            for number, parameter in enumerate(self._parameters):
                found = {name: get(parameter, name) for name in MOMENTS}
                if self.rank == 0:
                    state.adamw[number] = {
                        name: copied(value) for name, value in ({"step": step} | found).items()
                    }
        return state if self.rank == 0 else None

    def load(self, state: State) -> None:
        import deepspeed

        with torch.no_grad():
            for name, tensor in tensors_of(self.student).items():
                with self._whole(tensor, changed=True):
                    tensor.copy_(state.weights[name])
        if self._stage == 0:
            set_adamw(self._optimizer, self._parameters, state.adamw)
            return
        for name, parameter in self.student.named_parameters():
            if parameter.requires_grad:
                deepspeed.utils.safe_set_full_fp32_param(parameter, state.weights[name])
        if not state.adamw:
            return
        self._make_adamw(next(iter(state.adamw.values()))["step"])
        for number, one in state.adamw.items():
            parameter = self._parameters[number]
            for name in MOMENTS:
                deepspeed.utils.safe_set_full_optimizer_state(parameter, one[name], name)

    def _whole(self, tensor: Tensor, changed: bool = False) -> AbstractContextManager[None]:
        """Within it a tensor that ZeRO 3 has cut is whole; changes to it stay if that is asked."""
        if self._stage < 3 or not hasattr(tensor, "ds_id"):
            return nullcontext()
        import deepspeed

        found: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(
            [tensor], modifier_rank=0 if changed else None
        )
        return found

    @property
    def _adamw(self) -> torch.optim.Optimizer:
        """Torch's, of this worker's share (ZeRO 1 to 3)."""
        inner: torch.optim.Optimizer = self._optimizer.optimizer
        return inner

    def _make_adamw(self, step: Tensor) -> None:
        """AdamW's state of this worker's share, which else is made by the first step."""
        zero, cut = self._optimizer, self._stage == 3
        shares = zero.fp32_partitioned_groups_flat if cut else zero.single_partition_of_fp32_groups
        for share in shares:
            moments = {name: torch.zeros_like(share) for name in MOMENTS}
            self._adamw.state[share] = {"step": step.clone(), **moments}
        if not cut:
            zero._lazy_init_hp_params_optimizer_state()

    def encoder_weights(self) -> dict[str, Tensor]:
        encoder = self.student.encoder
        if self._stage < 3:
            return cpu_copy(encoder)
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(encoder.parameters())):
            return cpu_copy(encoder)

    def gather_rows(self, rows: Tensor) -> Tensor:
        return gather_rows(rows)

    def sum_over_workers(self, x: Tensor) -> Tensor:
        return all_reduced(x)

    def barrier(self) -> None:
        dist.barrier()

    def layout(self) -> dict[str, Any]:
        return {"engine": "deepspeed", "workers": self.num_workers, "zero_stage": self._stage}


def start_deepspeed() -> None:
    """Joins the process group that the host has prepared (rank and address in the environment)."""
    gpus = torch.cuda.is_available()
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    # DeepSpeed compiles an operator at its first start and looks for ninja on the PATH
    os.environ["PATH"] = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    if not gpus:
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.init_distributed(dist_backend="nccl" if gpus else "gloo", auto_mpi_discovery=False)


def gather_rows(rows: Tensor) -> Tensor:
    """(b, D) of every worker as (B, D) in rank order; only the own rows carry gradient."""
    everyone = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, rows.detach().contiguous())
    everyone[dist.get_rank()] = rows
    return torch.cat(everyone)


def adamw(parameters: list[torch.nn.Parameter], settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW (0.9, 0.999, 1e-8), fused: 101 ms against 501 ms for 22.5 M parameters on 2 cores.

    Weight decay spares biases and the weights of norms, all that are vectors.
    """
    decay = settings.weight_decay
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if decay:
        matrices = [p for p in parameters if p.ndim > 1]
        vectors = [p for p in parameters if p.ndim <= 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, weight_decay=decay, fused=True)


def cpu_copy(encoder: Encoder) -> dict[str, Tensor]:
    """Its weights: the backbone's by their own names, those of Dense modules as `dense.`"""
    dense = {f"dense.{name}": x for name, x in encoder.dense.state_dict().items()}
    found = encoder.backbone.state_dict() | dense
    return {name: x.detach().to("cpu", copy=True) for name, x in found.items()}
