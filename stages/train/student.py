"""The student: an encoder, and what exists only while training (head, template bias, ...)."""

import inspect
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from stages.encoder.model import Encoder, load_encoder, set_dropout
from stages.encoder.settings import EncoderSettings
from stages.encoder.tokenizer import SentenceTokenizer, load_view_tokenizers
from stages.errors import UserError
from stages.train.auxiliary import AuxiliaryInput, GlobalBatchNorm, build_auxiliary
from stages.train.settings import Objectives, StudentSettings
from stages.train.views import view_names

Sums = dict[str, tuple[Tensor, Tensor]]


class Student(nn.Module):
    """Token ids to vectors: with the head in training mode, without it in evaluation mode.

    "Train with the MLP, test without" (SimCSE). The head is tanh(Wx + b), W (D, D) drawn from
    N(0, 0.02), b zero, not the backbone's pretrained pooler; DenoSent's Wx + b; or DiffCSE's two
    layers with batch norm.
    """

    def __init__(
        self,
        encoder: Encoder,
        settings: StudentSettings,
        tokenizers: list[SentenceTokenizer],
        head: nn.Module,
        auxiliary: nn.ModuleDict,
        views: tuple[str, ...],
        autocast: bool,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.tokenizers = tokenizers
        self.views = views
        self.auxiliary = auxiliary
        self.autocast = autocast
        self._denoises = settings.template_denoising
        if (
            self._denoises
            and "position_ids" not in inspect.signature(encoder.backbone.forward).parameters
        ):
            raise UserError(
                f"student.template_denoising: model '{settings.model}' takes no position ids, "
                "which it needs; leave template_denoising out"
            )
        if settings.dropout is not None:
            set_dropout(encoder.backbone, settings.dropout)
        self.head = head

    def forward(
        self, ids_BL: Tensor, mask_BL: Tensor, masked: dict[str, tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Sums]:
        """Vectors (B, D) float32 and, in training, sum and count of each auxiliary loss.

        Autocast is for the transformers alone: what makes cosines of their states (pooling, bias,
        head) and losses of those is float32. In training the rows are V views of b sentences
        each, one view after the other.

        Args:
            masked: by auxiliary objective, masked copies of the first two views' ids and where.
        """
        with self._autocast(ids_BL):
            states_BLD = self.encoder.states(ids_BL, mask_BL)
        vectors_BD = self.encoder.pool(states_BLD, ids_BL, mask_BL)
        if not self.training:
            return vectors_BD, {}
        if self._denoises:
            vectors_BD = vectors_BD - self.template_bias(mask_BL)
        vectors_BD = self.head(vectors_BD)
        two = 2 * len(ids_BL) // len(self.views)
        with self._autocast(ids_BL):
            sums = {
                name: module(
                    self.encoder,
                    AuxiliaryInput(ids_BL[:two], mask_BL[:two], masked.get(name)),
                    vectors_BD[:two],
                )
                for name, module in self.auxiliary.items()
            }
        return vectors_BD, sums

    def _autocast(self, x: Tensor) -> torch.autocast:
        return torch.autocast(x.device.type, torch.bfloat16, enabled=self.autocast)

    def template_bias(self, mask_BL: Tensor) -> Tensor:
        """What the bare template gives where its end stands as far back as in each row (B, D).

        PromptBERT (Jiang et al., EMNLP 2022): h - b_T(l) for a sentence of l tokens, with gradient
        and dropout. Computed once for every length in the batch.
        """
        biases = []
        for view, rows in enumerate(mask_BL.chunk(len(self.views))):
            tokenizer = self.tokenizers[min(view, 1)]
            prefix, suffix = len(tokenizer.prefix), len(tokenizer.suffix)
            lengths, row_of = torch.unique(rows.sum(1) - prefix - suffix, return_inverse=True)
            template = torch.tensor([*tokenizer.prefix, *tokenizer.suffix], device=rows.device)
            ids_UP = template.expand(len(lengths), -1)
            positions_UP = torch.arange(prefix + suffix, device=rows.device).repeat(len(lengths), 1)
            positions_UP[:, prefix:] += lengths[:, None]
            everywhere = torch.ones_like(ids_UP)
            with self._autocast(ids_UP):
                states_UPD = self.encoder.states(ids_UP, everywhere, positions_UP)
            biases.append(self.encoder.pool(states_UPD, ids_UP, everywhere)[row_of])
        return torch.cat(biases)


def build_head(kind: str, dimension: int) -> nn.Module:
    """The layers between pooling and loss, freshly initialised."""
    if kind in ("tanh", "linear"):
        linear = nn.Linear(dimension, dimension)
        nn.init.normal_(linear.weight, std=0.02)
        nn.init.zeros_(linear.bias)
        return nn.Sequential(linear, nn.Tanh()) if kind == "tanh" else linear
    if kind == "batchnorm":
        return nn.Sequential(
            nn.Linear(dimension, 2 * dimension, bias=False),
            GlobalBatchNorm(2 * dimension, affine=True),
            nn.ReLU(),
            nn.Linear(2 * dimension, dimension, bias=False),
            GlobalBatchNorm(dimension, affine=False),
        )
    return nn.Identity()


def build_student(
    settings: StudentSettings, objectives: Objectives, seed: int, autocast: bool
) -> Student:
    """The student at step 0. The head's initial weights depend on `seed` alone."""
    encoder = load_encoder(settings)
    tokenizers = load_view_tokenizers(settings.view_settings())
    torch.manual_seed(seed)
    head = build_head(settings.head, encoder.dimension)
    auxiliary = build_auxiliary(objectives, settings, encoder)
    views = view_names(objectives)
    student = Student(encoder, settings, tokenizers, head, auxiliary, views, autocast)
    return student.to(encoder.device)


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
    write_about(encoder.settings, folder)


def write_about(settings: EncoderSettings, folder: Path) -> None:
    """`sentray.json`: what a model folder must say beside its weights (see `resolved`)."""
    about = {key: getattr(settings, key) for key in ("pooling", "template", "final_period")}
    (folder / "sentray.json").write_text(json.dumps(about, indent=2) + "\n")
