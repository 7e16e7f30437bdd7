"""What a training is at a step, whoever runs it: weights, buffers and AdamW's moments, each whole.

    model.NAME            a parameter or buffer of the student
    adamw.NUMBER.NAME     exp_avg, exp_avg_sq and step of a trained parameter, by its place

One safetensors file in float32, so nothing is ever unpickled, and a training goes on with another
number of workers or another ZeRO stage. It is as large as model and optimizer together, once, in
the memory of the first worker when it is written and of every worker when it is read.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from stages.errors import StorageError
from stages.train.checkpoint import write_tensors

STATE = "state.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")


class State(NamedTuple):
    """weights: by name. adamw: of each trained parameter by its place; none before a first step."""

    weights: dict[str, Tensor]
    adamw: dict[int, dict[str, Tensor]]

    def write(self, folder: Path) -> None:
        tensors = {f"model.{name}": tensor for name, tensor in self.weights.items()}
        for number, one in self.adamw.items():
            tensors |= {f"adamw.{number}.{name}": value for name, value in one.items()}
        write_tensors(tensors, folder / STATE)


def read_state(folder: Path, device: torch.device) -> State:
    """The state that `State.write` wrote.

    Raises:
        StorageError: there is none, as in checkpoints of older versions.
    """
    if not (folder / STATE).is_file():
        raise StorageError(
            "train: the unfinished training's checkpoint is of another version of Sentray, and "
            "cannot be continued. Start it afresh: sentray run RECIPE --force train"
        )
    state = State({}, {})
    for key, value in load_file(folder / STATE, device=str(device)).items():
        kind, _, name = key.partition(".")
        if kind == "model":
            state.weights[name] = value
        else:
            number, _, name = name.partition(".")
            state.adamw.setdefault(int(number), {})[name] = value
    return state


def tensors_of(student: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, each once: a tied one has two names in a state dict."""
    return dict(student.named_parameters()) | dict(student.named_buffers())


def copied(tensor: Tensor) -> Tensor:
    """In the CPU's memory, whatever becomes of the original."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def adamw_of(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]
) -> dict[int, dict[str, Tensor]]:
    """Copies of an optimizer's state, by a parameter's place in the list."""
    return {
        number: {name: copied(value) for name, value in optimizer.state[parameter].items()}
        for number, parameter in enumerate(parameters)
        if parameter in optimizer.state
    }


def set_adamw(
    optimizer: torch.optim.Optimizer,
    parameters: list[nn.Parameter],
    adamw: dict[int, dict[str, Tensor]],
) -> None:
    """As `adamw_of` had it."""
    for number, one in adamw.items():
        optimizer.state[parameters[number]] = {name: value.clone() for name, value in one.items()}
