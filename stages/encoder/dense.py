"""Dense modules behind the pooling, in sentence-transformers' files."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stages.encoder.config import described_in
from stages.encoder.files import model_folder, read_json
from stages.encoder.modules import ACTIVATIONS
from stages.encoder.settings import EncoderSettings
from stages.encoder.tokenizer import readable_errors

IDENTITY, TANH = ACTIVATIONS


class Dense(nn.Module):
    """act(Wx + b) on vectors (B, D), float32; act is tanh or nothing."""

    def __init__(self, linear: nn.Linear, activation: str = IDENTITY) -> None:
        super().__init__()
        self.linear = linear
        self.activation = activation

    def forward(self, x_BD: Tensor) -> Tensor:
        found: Tensor = self.linear(x_BD)
        return torch.tanh(found) if self.activation == TANH else found


def load_dense(settings: EncoderSettings, places: Sequence[str]) -> nn.Sequential:
    """The Dense modules in these folders of a model.

    Raises:
        UserError: weights that are not there or do not fit.
    """
    found = nn.Sequential()
    for place in places:
        config = read_json(described_in(settings) / place / "config.json")
        bias = config.get("bias", True)
        linear = nn.Linear(config["in_features"], config["out_features"], bias=bias)
        with readable_errors(settings.model):
            weights = load_file(_weights_file(settings, f"{place}/model.safetensors"))
            own = {name.removeprefix("linear."): x.float() for name, x in weights.items()}
            if {k: x.shape for k, x in own.items()} != {
                k: x.shape for k, x in linear.state_dict().items()
            }:
                raise ValueError(f"{place}: the weights are not those of its config.json")
        linear.load_state_dict(own)
        found.append(Dense(linear, config.get("activation_function", TANH)))
    return found


def _weights_file(settings: EncoderSettings, name: str) -> Path:
    folder = model_folder(settings.model)
    if folder is not None:
        return folder / name
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(settings.model, name, revision=settings.commit))


def save_dense(modules: nn.Sequential, weights: dict[str, Tensor], folder: Path) -> list[str]:
    """Writes `2_Dense` and so on into a model's folder; returns their names.

    Args:
        weights: state of `modules` by name, e.g. the best evaluation's.
    """
    places = []
    for number, module in enumerate(modules):
        assert isinstance(module, Dense)
        place = folder / f"{number + 2}_Dense"
        place.mkdir()
        about = {
            "in_features": module.linear.in_features,
            "out_features": module.linear.out_features,
            "bias": module.linear.bias is not None,
            "activation_function": module.activation,
        }
        (place / "config.json").write_text(json.dumps(about, indent=2) + "\n")
        prefix = f"{number}."
        own = {k.removeprefix(prefix): x for k, x in weights.items() if k.startswith(prefix)}
        save_file({name: x.contiguous() for name, x in own.items()}, place / "model.safetensors")
        places.append(place.name)
    return places
