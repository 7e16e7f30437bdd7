"""Objectives that need modules of their own while training, dropped afterwards.

Each returns the sum over this worker's tokens and their number, so that the loop can divide by
the number of the whole global batch.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from stages.encoder.model import Encoder, load_backbone, load_pretrained, set_dropout
from stages.encoder.settings import EncoderSettings, ModelSettings
from stages.encoder.tokenizer import load_tokenizer
from stages.errors import UserError
from stages.train.settings import Objectives, StudentSettings


def build_auxiliary(
    objectives: Objectives, settings: StudentSettings, encoder: Encoder
) -> nn.ModuleDict:
    """The modules of the recipe's objectives, by objective."""
    found: dict[str, nn.Module] = {}
    if objectives.masked_language is not None:
        found["masked_language"] = MaskedLanguageHead(settings, encoder)
    if objectives.replaced_token is not None:
        generator = objectives.replaced_token.generator
        found["replaced_token"] = ReplacedTokenDetector(settings, encoder, generator)
    return nn.ModuleDict(found)


@dataclass(frozen=True)
class AuxiliaryInput:
    """Token ids, mask, masked copy and where it was chosen, of the first two views: (2 b, L)."""

    ids: Tensor
    mask: Tensor
    masked: Tensor
    chosen: Tensor


class MaskedLanguageHead(nn.Module):
    """SimCSE's optional term: the student's own pretrained head predicts masked tokens."""

    def __init__(self, settings: StudentSettings, encoder: Encoder) -> None:
        super().__init__()
        self.model = load_masked_language_model(settings)
        setattr(self.model, self.model.base_model_prefix, _GivenStates())
        # tied: the vocabulary matrix is the student's own word embedding
        self.model.get_output_embeddings().weight = encoder.backbone.get_input_embeddings().weight

    def forward(
        self, encoder: Encoder, batch: AuxiliaryInput, vectors_D: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Cross-entropy of the chosen tokens, summed, and their number."""
        given: Any = getattr(self.model, self.model.base_model_prefix)
        # the head over the chosen tokens only: a vocabulary of 30,000 makes the rest gigabytes
        given.states = encoder.states(batch.masked, batch.mask)[batch.chosen].unsqueeze(0)
        logits = self.model(input_ids=batch.masked).logits[0].float()
        loss = F.cross_entropy(logits, batch.ids[batch.chosen], reduction="sum")
        return loss, batch.chosen.sum()


class _GivenStates(nn.Module):
    """Stands where a masked-language model has its backbone, and returns the student's states."""

    states: Tensor

    def forward(self, *inputs: Any, **options: Any) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=self.states)


class ReplacedTokenDetector(nn.Module):
    """DiffCSE (Chuang et al., NAACL 2022): which tokens did a frozen generator replace?

    The discriminator starts like the student and is trained beside it; its first token's
    embedding is the sentence vector (after embedding norm and dropout), which is how the
    difference must be in the vector. As in the released code the generator is greedy at every
    position and keeps its dropout; unlike there, padding does not count (it dilutes the mean by
    an amount that depends on the batch).
    """

    def __init__(
        self, settings: StudentSettings, encoder: Encoder, generator: ModelSettings
    ) -> None:
        super().__init__()
        self.discriminator, _ = load_backbone(settings)
        width = self.discriminator.get_input_embeddings().embedding_dim
        if not hasattr(self.discriminator, "embeddings") or width != encoder.dimension:
            raise UserError(
                f"replaced_token: the token embeddings of model '{settings.model}' are not as wide "
                "as its vectors, so the discriminator cannot be given one; choose another model"
            )
        if settings.dropout is not None:
            set_dropout(self.discriminator, settings.dropout)
        self.detect = nn.Linear(encoder.dimension, 2)
        model = load_masked_language_model(generator).requires_grad_(False).train()
        own, other = (t.pretrained.get_vocab() for t in (encoder.tokenizer, load_tokenizer(
            EncoderSettings(**generator.model_dump(), pooling="cls"))))  # fmt: skip
        if own != other:
            raise UserError(
                f"replaced_token.generator '{generator.model}': its vocabulary is not the "
                f"student's ('{settings.model}'); choose one with the same tokenizer"
            )
        # in a list, so that neither the engine nor the checkpoints take it for a part of the model
        self._generator = [model]

    def forward(
        self, encoder: Encoder, batch: AuxiliaryInput, vectors_D: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Cross-entropy over all tokens but padding, summed, and their number."""
        edited = self.edit(batch)
        replaced = ((edited != batch.ids) & batch.mask.bool()).long()

        def condition(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            first = vectors_D.to(output.dtype).unsqueeze(1)
            return torch.cat([first, output[:, 1:]], dim=1)

        handle = self.discriminator.embeddings.register_forward_hook(condition)
        try:
            states = self.discriminator(input_ids=edited, attention_mask=batch.mask)
        finally:
            handle.remove()
        logits = self.detect(states.last_hidden_state).float()
        target = replaced.masked_fill(batch.mask == 0, -100)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
        return loss, batch.mask.sum()

    @torch.no_grad()
    def edit(self, batch: AuxiliaryInput) -> Tensor:
        """Ids with the generator's best token everywhere; the first token and padding as before."""
        model = self._generator[0].to(batch.ids.device)
        best = model(input_ids=batch.masked, attention_mask=batch.mask).logits.argmax(-1)
        edited = torch.where(batch.mask.bool(), best, batch.ids)
        edited[:, 0] = batch.ids[:, 0]
        return edited


def load_masked_language_model(settings: ModelSettings) -> Any:
    """A pretrained masked-language model with its head, float32, from safetensors.

    Raises:
        UserError: no such model, or it was saved without its head.
    """
    from transformers import AutoModelForMaskedLM

    model, about = load_pretrained(AutoModelForMaskedLM, settings, output_loading_info=True)
    if about["missing_keys"]:
        raise UserError(
            f"model '{settings.model}': it was saved without its masked-language head "
            f"({sorted(about['missing_keys'])[0]} is missing); use the pretrained model itself"
        )
    return model


class GlobalBatchNorm(nn.Module):
    """Batch norm over the rows of all workers, in training only (no running statistics).

    Both views of the global batch are normalised together, as on one device.
    """

    def __init__(self, width: int, affine: bool) -> None:
        super().__init__()
        self.affine = affine
        if affine:
            self.weight = nn.Parameter(torch.ones(width))
            self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x_bD: Tensor) -> Tensor:
        x_bD = x_bD.float()
        mean_D = _mean_over_workers(x_bD)
        centred_bD = x_bD - mean_D
        variance_D = _mean_over_workers(centred_bD**2)
        normal_bD = centred_bD * torch.rsqrt(variance_D + 1e-5)
        return normal_bD * self.weight + self.bias if self.affine else normal_bD


def _mean_over_workers(x_bD: Tensor) -> Tensor:
    total = _SumOverWorkers.apply(x_bD.sum(0))
    workers = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return total / (len(x_bD) * workers)


class _SumOverWorkers(torch.autograd.Function):
    """All-reduce whose gradient is all-reduced too: every worker's loss depends on every input."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return _all_reduced(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        return _all_reduced(gradients[0])


def _all_reduced(x: Tensor) -> Tensor:
    x = x.clone()
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(x)
    return x
