"""The student: an encoder, and what exists only while training (head, template bias, ...)."""

import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from stages.encoder.cpu import computed_type
from stages.encoder.dense import save_dense
from stages.encoder.model import Encoder, freeze_layers, load_encoder, pick_device, set_dropout
from stages.encoder.packing import can_pack, packed_length, packed_states
from stages.encoder.settings import EncoderSettings
from stages.encoder.static import save_static
from stages.encoder.tokenizer import SentenceTokenizer, load_view_tokenizers, save_tokenizer
from stages.errors import UserError
from stages.rows import FactorRows
from stages.train.auxiliary import AuxiliaryInput, GlobalBatchNorm, build_auxiliary
from stages.train.settings import Objectives, TrainSettings
from stages.train.student_settings import StudentSettings, check_frozen, check_widths
from stages.train.vectors import align, turn_to_principal
from stages.train.views import view_names

# Groups of like length that a CPU computes attention in, or everything where a model cannot be
# packed: padding costs what tokens cost there. Of 128 sentences of up to 32 tokens 45% is padding,
# 13% of four groups. Of 64 it is 24% of two groups, 13% of four.
MAX_GROUPS, MIN_ROWS = 4, 16

Sums = dict[str, tuple[Tensor, Tensor]]


class SingleAttention(TorchFunctionMode):
    """The backbone's attention in float32 under autocast on a CPU (not that of DenoSent's decoder).

    There torch 2.13's kernel takes 65 ms for the gradient of one layer of 128 sentences of 32
    tokens in bfloat16 (two cores, MiniLM), and 9 ms in float32: half of a training step.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **given)
        with torch.autocast("cpu", enabled=False):
            found = func(*map(_single, args), **{key: _single(x) for key, x in given.items()})
        return found.to(args[0].dtype)


def _single(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x


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
        self.widths = widths_of(settings, encoder.dimension)
        self.auxiliary = auxiliary
        self.autocast = autocast
        self.on_cpu = encoder.device.type == "cpu"
        self.packs = self.on_cpu and can_pack(encoder)
        self.num_positions = 0  # of the last forward pass, padding included
        self._denoises = settings.template_denoising
        config = encoder.backbone.config
        takes_positions = (
            "position_ids" in inspect.signature(encoder.backbone.forward).parameters
            and getattr(config, "position_biased_input", True)  # DeBERTa's, false in version 3
        )
        if self._denoises and not takes_positions:
            raise UserError(
                f"student.template_denoising: model '{settings.model}' takes no position ids, "
                "which it needs; leave template_denoising out"
            )
        if settings.dropout is not None:
            set_dropout(encoder.backbone, settings.dropout)
        if settings.freeze_embeddings:
            encoder.backbone.get_input_embeddings().requires_grad_(False)
        if settings.freeze_layers:
            check_frozen(settings, encoder.num_layers)
            freeze_layers(encoder.backbone, settings.freeze_layers)
        self.head = head

    def forward(
        self,
        ids_BL: Tensor,
        mask_BL: Tensor,
        masked: dict[str, tuple[Tensor, Tensor]],
        factors: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Sums]:
        """Vectors (B, D) float32 and, in training, sum and count of each auxiliary loss.

        Autocast is for the transformers alone: what makes cosines of their states (pooling, bias,
        head) and losses of those is float32, and so is the backbone's attention on a CPU. In
        training the rows are V views of b sentences each, one view after the other.

        Args:
            masked: by auxiliary objective, masked copies of views 1 and 2's ids and where.
            factors: by teacher, its vectors of the b sentences.
        """
        vectors_BD = self._vectors(ids_BL, mask_BL)
        if not self.training:
            return vectors_BD, {}
        if self._denoises:
            vectors_BD = vectors_BD - self.template_bias(mask_BL)
        vectors_BD = self.head(vectors_BD)
        num_views = 1 + ("second" in self.views)
        plain = len(ids_BL) // len(self.views) * num_views
        with self._autocast(ids_BL):
            sums = {
                name: module(
                    self.encoder,
                    AuxiliaryInput(
                        ids_BL[:plain], mask_BL[:plain], num_views, masked.get(name), factors
                    ),
                    vectors_BD[:plain],
                )
                for name, module in self.auxiliary.items()
            }
        return vectors_BD, sums

    def _vectors(self, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Pooled vectors (B, D). In training on a CPU without padding, or in groups of like length.

        The number of groups is the same on every worker: ZeRO-3 gathers weights in each.
        """
        if not self.training or not self.on_cpu:
            return self._pooled([(ids_BL, mask_BL)])
        lengths_B = mask_BL.sum(1)
        order_B = lengths_B.argsort(stable=True)
        groups = order_B.tensor_split(max(1, min(MAX_GROUPS, len(ids_BL) // MIN_ROWS)))
        if self.packs:
            self.num_positions = packed_length(int(lengths_B.sum()))
            with self._autocast(ids_BL):
                states_BLD = packed_states(self.encoder, ids_BL, mask_BL, groups)
            return self.encoder.pool(states_BLD, ids_BL, mask_BL)
        batches = []
        for rows in groups:
            longest = int(lengths_B[rows[-1]])
            batches.append((ids_BL[rows, :longest], mask_BL[rows, :longest]))
        return self._pooled(batches)[order_B.argsort()]

    def _pooled(self, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        self.num_positions = sum(ids.numel() for ids, _ in batches)
        with self._autocast(batches[0][0]):  # one for all: it casts each weight once
            states = [self.encoder.states(ids, mask) for ids, mask in batches]
        return torch.cat(
            [self.encoder.pool(x, *batch) for x, batch in zip(states, batches, strict=True)]
        )

    @contextmanager
    def _autocast(self, x: Tensor) -> Iterator[None]:
        with (
            torch.autocast(x.device.type, torch.bfloat16, enabled=self.autocast),
            SingleAttention() if self.autocast and self.on_cpu else nullcontext(),
        ):
            yield

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
    settings: StudentSettings,
    objectives: Objectives,
    seed: int,
    autocast: bool,
    teachers: Sequence[tuple[FactorRows, float]] = (),
    rewritten: bool = False,
) -> Student:
    """The student at step 0. The head's initial weights depend on `seed` alone.

    Args:
        teachers: factors and weight of each, where an objective needs them.
        rewritten: whether one of two views is a rewrite.
    """
    encoder = load_encoder(settings)
    if settings.aligned:
        ((factors, _),) = teachers
        align(encoder, factors)
    tokenizers = load_view_tokenizers(settings.view_settings())
    torch.manual_seed(seed)
    head = build_head(settings.head, encoder.dimension)
    regression = objectives.vector_regression
    if settings.is_cut and regression and regression.projection == "auto":
        turn_to_principal(encoder, [factors for factors, _ in teachers])
    auxiliary = build_auxiliary(objectives, settings, encoder, teachers)
    views = view_names(objectives, settings.views_differ or rewritten)
    student = Student(encoder, settings, tokenizers, head, auxiliary, views, autocast)
    return student.to(encoder.device)


def autocasts(settings: TrainSettings, device: str) -> bool:
    """Whether forward passes of a training run under autocast (see `computed_type`)."""
    return computed_type(settings.precision, pick_device(device)) == torch.bfloat16


def widths_of(settings: StudentSettings, dimension: int) -> tuple[int, ...]:
    """The width of the vectors, and those that they may be cut to, widest first.

    Raises:
        UserError: see `check_widths`.
    """
    check_widths(settings.dimensions, dimension)
    return (dimension, *sorted({*settings.dimensions} - {dimension}, reverse=True))


def step_seed(seed: int, step: int, rank: int) -> int:
    """Seed of the dropout masks of one step on one worker, so that a resumed run repeats them."""
    return int(np.random.Philox(key=[seed, step * 65536 + rank]).random_raw() >> np.uint64(1))


def save_encoder(encoder: Encoder, weights: dict[str, Tensor], folder: Path) -> None:
    """Writes backbone (safetensors), tokenizer, Dense modules and `sentray.json` as a model folder,
    a static table as sentence-transformers has it.

    Args:
        weights: of the encoder by name (`Engine.encoder_weights`), e.g. the best evaluation's.
    """
    if encoder.settings.is_static:
        save_static(encoder, weights, folder)
        return
    prefix = "dense."
    dense = {k.removeprefix(prefix): x for k, x in weights.items() if k.startswith(prefix)}
    own = {name: x for name, x in weights.items() if not name.startswith(prefix)}
    encoder.backbone.save_pretrained(
        folder, state_dict=own | encoder.unused_weights, safe_serialization=True
    )
    save_tokenizer(encoder.tokenizer.pretrained, folder)
    write_about(encoder.settings, folder, save_dense(encoder.dense, dense, folder))


def write_about(settings: EncoderSettings, folder: Path, dense: Sequence[str] = ()) -> None:
    """`sentray.json`: what a model folder must say beside its weights (see `resolved`).

    Args:
        dense: folders of Dense modules.
    """
    about = {key: getattr(settings, key) for key in ("pooling", "template", "final_period")}
    if settings.prompt:
        about["prompt"] = settings.prompt
    if settings.prompts:
        about["prompts"] = settings.prompts
    if dense:
        about["dense"] = [*dense]
    (folder / "sentray.json").write_text(json.dumps(about, indent=2) + "\n")
