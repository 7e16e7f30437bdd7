"""Arithmetic on a CPU: which types it multiplies fast, and linear layers packed for inference.

Packed: oneDNN with weights in its own layout, GELU in the same pass. torch's own float32 layers use
MKL: as fast on some processors, half as fast on others.
"""

import statistics
import time
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# The matrix product that is timed: tokens of a quarter of a batch. 1 to 20 ms a time with MiniLM
NUM_ROWS = 1024
NUM_ROUNDS = 9

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NOT_HERE = "float32, as this processor has no instructions for {}"


def computed_type(precision: str, device: torch.device) -> torch.dtype:
    """The type that a forward pass in `precision` is computed in.

    float32 on a CPU without instructions for the 16-bit one: there bfloat16 is an eighth as fast as
    float32 (384 x 1,536, AMD EPYC of 2021), and less exact.
    """
    dtype = DTYPES[precision]
    return dtype if device.type != "cpu" or _is_supported(dtype) else torch.float32


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Weights in the type that forward passes are computed in. The frequencies of rotary positions
    stay as they are, as transformers keeps them when it loads a model in 16 bits: in bfloat16 the
    angles at position 512 would be off by up to 0.6."""
    exact = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq")
    ]
    model.to(dtype)
    for module, name, buffer in exact:
        setattr(module, name, buffer)


class PackedLinear(nn.Module):
    """act(x W^T + b) with W in oneDNN's own layout; without gradient.

    Args:
        activation: none, or gelu (by the error function).
    """

    def __init__(self, linear: nn.Linear, activation: str = "none") -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.weight = torch.empty_like(weight, device="meta")  # models look at its type
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, NUM_ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._activation = activation

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias, self._activation, [], "none"
        )
        return out


def pack_linears(backbone: nn.Module) -> str:
    """Replaces a transformer's linear layers by packed ones where it stays what it was.

    Where those are slower on this processor (with a GELU, which is fused and makes up for some,
    under 0.8 times as fast), or the model computes anything else with them, torch's stay. Needs the
    weights twice while it looks.

    Returns:
        what was chosen, for the log.
    """
    places = [
        (module, name, child)
        for module in backbone.modules()
        for name, child in module.named_children()
        if type(child) is nn.Linear  # others, such as nn.MultiheadAttention's, are used as weights
    ]
    dtype = next(backbone.parameters()).dtype
    if not places:
        return "no linear layers that could be packed for oneDNN"
    if not _is_supported(dtype):
        return "WARNING: torch has no oneDNN here: linear layers may be twice as slow"
    largest = max((linear for _, _, linear in places), key=lambda linear: linear.weight.numel())
    gain = packed_gain(*largest.weight.shape, dtype, torch.get_num_threads())
    gelu = any(_is_gelu(getattr(module, "intermediate_act_fn", None)) for module, _, _ in places)
    if gain < (0.8 if gelu else 1):
        return f"torch's linear layers: packed for oneDNN they are {gain:.2f} times as fast"
    before = _sample(backbone)
    activations = []
    for module, name, linear in places:
        activation = getattr(module, "intermediate_act_fn", None)
        fused = name == "dense" and _is_gelu(activation)
        setattr(module, name, PackedLinear(linear, "gelu" if fused else "none"))
        if fused:
            activations.append((module, "intermediate_act_fn", activation))
            module.intermediate_act_fn = nn.Identity()
    try:
        same = F.cosine_similarity(before, _sample(backbone), dim=-1).min() > 0.999
    except (AttributeError, RuntimeError, TypeError):
        same = torch.tensor(False)
    if not same:
        for module, name, child in [*places, *activations]:
            setattr(module, name, child)
        return "WARNING: torch's linear layers, as this model computes otherwise with packed ones"
    return f"linear layers packed for oneDNN, {gain:.2f} times as fast as torch's"


def _is_supported(dtype: torch.dtype) -> bool:
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def _sample(backbone: nn.Module) -> Tensor:
    """States (8, D) of eight tokens, float32."""
    with torch.inference_mode():
        states: Tensor = backbone(input_ids=torch.arange(8)[None]).last_hidden_state
    return states[0].float()


@cache
def packed_gain(width_out: int, width_in: int, dtype: torch.dtype, num_threads: int) -> float:
    """How many times as fast packed weights are on this processor; measured once in a process.

    Median of paired rounds, as others use the processor too.
    """
    linear = nn.Linear(width_in, width_out, dtype=dtype)
    x = torch.randn(NUM_ROWS, width_in, dtype=dtype)
    ratios = []
    with torch.inference_mode():
        packed = PackedLinear(linear)
        for _ in range(NUM_ROUNDS):
            ratios.append(_seconds(linear, x) / _seconds(packed, x))
    return statistics.median(ratios)


def _seconds(layer: nn.Module, x: Tensor) -> float:
    started = time.perf_counter()
    layer(x)
    return time.perf_counter() - started


def _is_gelu(activation: object) -> bool:
    """Whether it is GELU by the error function, as BERT's kin have it between two layers."""
    if not isinstance(activation, nn.Module):
        return False
    x = torch.linspace(-4, 4, 64)
    return torch.allclose(activation(x), F.gelu(x), atol=1e-6)
