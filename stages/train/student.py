"""The student: an encoder, and a head that exists only while training."""

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from stages.encoder.model import Encoder, load_encoder
from stages.train.settings import StudentSettings


class Student(nn.Module):
    """Token ids to vectors: with the head in training mode, without it in evaluation mode.

    "Train with the MLP, test without" (SimCSE). The head is tanh(Wx + b), W (D, D) drawn from
    N(0, 0.02), b zero, not the backbone's pretrained pooler.
    """

    def __init__(self, encoder: Encoder, settings: StudentSettings, autocast: bool) -> None:
        super().__init__()
        self.encoder = encoder
        self.autocast = autocast
        if settings.dropout is not None:
            set_dropout(encoder.backbone, settings.dropout)
        self.head: nn.Module = nn.Identity()
        if settings.head == "tanh":
            linear = nn.Linear(encoder.dimension, encoder.dimension)
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
            self.head = nn.Sequential(linear, nn.Tanh())

    def forward(self, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Vectors (B, D) float32; autocast stays inside, so losses see float32."""
        with torch.autocast(ids_BL.device.type, torch.bfloat16, enabled=self.autocast):
            pooled_BD = self.encoder(ids_BL, mask_BL)
            vectors_BD = self.head(pooled_BD) if self.training else pooled_BD
        return vectors_BD.float()


def build_student(settings: StudentSettings, seed: int, autocast: bool) -> Student:
    """The student at step 0. The head's initial weights depend on `seed` alone."""
    encoder = load_encoder(settings)
    torch.manual_seed(seed)
    student = Student(encoder, settings, autocast)
    return student.to(encoder.device)


def set_dropout(backbone: nn.Module, rate: float) -> None:
    """Sets every dropout of a transformers backbone, attention included."""
    for module in backbone.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = rate  # type: ignore[assignment]


def step_seed(seed: int, step: int, rank: int) -> int:
    """Seed of the dropout masks of one step on one worker, so that a resumed run repeats them."""
    return int(np.random.Philox(key=[seed, step * 65536 + rank]).random_raw() >> np.uint64(1))


def save_encoder(encoder: Encoder, weights: dict[str, Tensor], folder: Path) -> None:
    """Writes backbone (safetensors), tokenizer and `sentray.json` as a model folder.

    Args:
        weights: the backbone's state by name, e.g. the best evaluation's, on the CPU.
    """
    encoder.backbone.save_pretrained(
        folder, state_dict=weights | encoder.unused_weights, safe_serialization=True
    )
    encoder.tokenizer.pretrained.save_pretrained(folder)
    settings = encoder.settings
    about = {"pooling": settings.pooling, "template": settings.template}
    (folder / "sentray.json").write_text(json.dumps(about, indent=2) + "\n")
