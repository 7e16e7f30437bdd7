"""Objectives that need modules of their own while training, dropped afterwards.

Each returns the sum over this worker's tokens or sentences and their number, so that the loop can
divide by the number of the whole global batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutput

from stages.encoder.model import Encoder, load_backbone, load_pretrained, set_dropout
from stages.encoder.settings import EncoderSettings, ModelSettings
from stages.encoder.tokenizer import load_tokenizer
from stages.errors import UserError
from stages.rows import FactorRows
from stages.train.objectives.denoising import Denoising
from stages.train.settings import Objectives
from stages.train.student_settings import StudentSettings


def build_auxiliary(
    objectives: Objectives,
    settings: StudentSettings,
    encoder: Encoder,
    teachers: Sequence[tuple[FactorRows, float]],
) -> nn.ModuleDict:
    """The modules of the recipe's objectives, by objective."""
    chosen = objectives.chosen
    built = {name: one.build(settings, encoder, teachers) for name, one in chosen.items()}
    return nn.ModuleDict({name: module for name, module in built.items() if module is not None})


@dataclass(frozen=True)
class AuxiliaryInput:
    """Token ids and mask of views 1 and 2 (2 b, L), or of view 1 alone where `num_views` is 1.

    copy: for objectives that mask, the masked ids and where they were chosen. factors: of every
    teacher the vectors of these b sentences (b, D), where an objective needs teachers.
    """

    ids: Tensor
    mask: Tensor
    num_views: int = 2
    copy: tuple[Tensor, Tensor] | None = None
    factors: Sequence[Tensor] = ()

    @property
    def masked(self) -> Tensor:
        assert self.copy is not None
        return self.copy[0]

    @property
    def chosen(self) -> Tensor:
        assert self.copy is not None
        return self.copy[1]


class VocabularyHead(nn.Module):
    """Token states to logits over the vocabulary: the masked-language head of the student's model.

    Its vocabulary matrix is tied to the student's word embedding, which so gets gradient, unless
    that is frozen.

    Args:
        new: initialise the head afresh, for models that were saved without one.
    """

    def __init__(self, settings: StudentSettings, encoder: Encoder, new: bool = False) -> None:
        super().__init__()
        self.model = load_masked_language_model(settings, head_may_miss=new)
        if new:
            inner = [child for child in self.model.children() if child is not self.model.base_model]
            for module in (inner for child in inner for inner in child.modules()):
                for parameter in module.parameters(recurse=False):
                    parameter._is_hf_initialized = False  # else what was loaded stays
                self.model._init_weights(module)
        setattr(self.model, self.model.base_model_prefix, _GivenStates())
        self.model.get_output_embeddings().weight = encoder.backbone.get_input_embeddings().weight

    def forward(self, states_TD: Tensor, ids_BL: Tensor) -> Tensor:
        """Logits (T, V) of some token states; `ids_BL` only says what the model was given."""
        given: Any = getattr(self.model, self.model.base_model_prefix)
        given.states = states_TD.unsqueeze(0)
        logits: Tensor = self.model(input_ids=ids_BL).logits[0]
        return logits


class MaskedLanguageHead(nn.Module):
    """SimCSE's optional term: the student's own pretrained head predicts masked tokens."""

    def __init__(self, settings: StudentSettings, encoder: Encoder) -> None:
        super().__init__()
        self.head = VocabularyHead(settings, encoder)

    def forward(
        self, encoder: Encoder, batch: AuxiliaryInput, vectors_D: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Cross-entropy of the chosen tokens, summed, and their number."""
        # the head over the chosen tokens only: a vocabulary of 30,000 makes the rest gigabytes
        states_TD = encoder.states(batch.masked, batch.mask)[batch.chosen]
        return token_cross_entropy(self.head(states_TD, batch.masked), batch.ids[batch.chosen])


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
        if not hasattr(self.discriminator, "embeddings"):
            raise UserError(
                f"replaced_token: model '{settings.model}' has no module of embeddings that a "
                "sentence's vector could be put into, as BERT's kin have; choose another model"
            )
        if width != encoder.dimension:
            raise UserError(
                f"replaced_token: the token embeddings of model '{settings.model}' are not as wide "
                "as its vectors, which the discriminator needs; choose another model"
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
        real = batch.mask.bool()
        return token_cross_entropy(self.detect(states.last_hidden_state)[real], replaced[real])

    @torch.no_grad()
    def edit(self, batch: AuxiliaryInput) -> Tensor:
        """Ids with the generator's best token everywhere; the first token and padding as before."""
        model = self._generator[0].to(batch.ids.device)
        best = model(input_ids=batch.masked, attention_mask=batch.mask).logits.argmax(-1)
        edited = torch.where(batch.mask.bool(), best, batch.ids)
        edited[:, 0] = batch.ids[:, 0]
        return edited


class Denoiser(nn.Module):
    """DenoSent's decoder (Wang et al., AAAI 2024): the tokens behind noisy embeddings, all at once.

    A post-norm Transformer decoder without causal mask, over the embedding layer's output of view
    2, detached, with a share `noise` of its numbers dropped; its memory is the one vector of view
    1 (after the head). Attention over one key is 1, so each layer adds a linear image of that
    vector: queries and keys there get a gradient of exactly 0.
    """

    def __init__(self, settings: StudentSettings, encoder: Encoder, chosen: Denoising) -> None:
        super().__init__()
        width = encoder.dimension
        embeddings = getattr(encoder.backbone, "embeddings", None)
        word = encoder.backbone.get_input_embeddings().embedding_dim
        if not hasattr(embeddings, "position_embeddings") or word != width:
            raise UserError(
                f"denoising: model '{settings.model}' has no embedding layer with positions that "
                "is as wide as its vectors, which the decoder needs; choose another model"
            )
        if width % chosen.attention_heads:
            raise UserError(
                f"train.objectives.denoising.attention_heads: {chosen.attention_heads} heads do "
                f"not divide the {width} dimensions of model '{settings.model}'"
            )
        self.layers = decoder_layers(width, chosen)
        self.head = VocabularyHead(settings, encoder, chosen.vocabulary_head == "new")
        self._noise, self._target = chosen.noise, chosen.target

    def forward(
        self, encoder: Encoder, batch: AuxiliaryInput, vectors_D: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Cross-entropy of the target's tokens (template and special tokens too), summed."""
        (first_ids, *_), (first_mask, *_) = ids, mask = [
            rows.chunk(batch.num_views) for rows in (batch.ids, batch.mask)
        ]
        ids_bL, mask_bL = ids[-1], mask[-1]
        with torch.no_grad():
            noisy_bLD = F.dropout(encoder.backbone.embeddings(ids_bL), self._noise)
        memory_b1D = vectors_D.chunk(batch.num_views)[0].unsqueeze(1)
        states_bLD = noisy_bLD
        for layer in self.layers:
            states_bLD = layer(states_bLD, memory_b1D, tgt_key_padding_mask=mask_bL == 0)
        if self._target == "memory":
            ids_bL, mask_bL = first_ids, first_mask
        real = mask_bL.bool()
        return token_cross_entropy(self.head(states_bLD[real], ids_bL), ids_bL[real])


def decoder_layers(width: int, chosen: Denoising) -> nn.ModuleList:
    """The layers of DenoSent's decoder, 126,046,208 parameters at width 768 by default.

    Linear layers start from N(0, 0.02), the fused attention projections from Xavier's, each layer
    by itself: nn.TransformerDecoder would start all layers alike.
    """
    layers = nn.ModuleList(
        nn.TransformerDecoderLayer(
            width, chosen.attention_heads, chosen.feed_forward, chosen.dropout, batch_first=True
        )
        for _ in range(chosen.layers)
    )
    for module in layers.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
    return layers


def load_masked_language_model(settings: ModelSettings, head_may_miss: bool = False) -> Any:
    """A pretrained masked-language model with its head, float32, from safetensors.

    Raises:
        UserError: no such model, or it was saved without its head and that may not be.
    """
    from transformers import AutoModelForMaskedLM

    model, about = load_pretrained(AutoModelForMaskedLM, settings, output_loading_info=True)
    if about["missing_keys"] and not head_may_miss:
        raise UserError(
            f"model '{settings.model}': it was saved without its masked-language head "
            f"({sorted(about['missing_keys'])[0]} is missing); use the pretrained model itself, "
            "or, for denoising, set vocabulary_head: new"
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
        return all_reduced(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        return all_reduced(gradients[0])


def all_reduced(x: Tensor) -> Tensor:
    """The sum of all workers', as another tensor; no gradient."""
    x = x.clone()
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(x)
    return x


def token_cross_entropy(logits_TV: Tensor, ids_T: Tensor) -> tuple[Tensor, Tensor]:
    """-log softmax(logits)_id summed over tokens, at least in float32, and their number.

    What denoising (DenoSent), the masked-language term and replaced-token detection are made of;
    the caller leaves out padding.
    """
    dtype = torch.promote_types(logits_TV.dtype, torch.float32)
    total = F.cross_entropy(logits_TV.to(dtype), ids_T, reduction="sum")
    return total, torch.tensor(len(ids_T), device=ids_T.device)
