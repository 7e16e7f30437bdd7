"""The encoder: a transformers backbone, its pooling, and Dense modules behind it.

Not here: training heads (stages/train/student.py) and anything that writes files.
Shapes: B rows, L tokens, D hidden size, N texts.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from stages.contract import Work
from stages.encoder.config import check_config, described_in, kept_layers, position_offset, resolved
from stages.encoder.cpu import DTYPES, NOT_HERE, cast_weights, computed_type, pack_linears
from stages.encoder.dense import Dense, load_dense
from stages.encoder.files import model_folder
from stages.encoder.modules import read_pipeline
from stages.encoder.pipeline import PipelineEncoder
from stages.encoder.settings import EncoderSettings, ModelSettings
from stages.encoder.static import StaticTable, load_static, token_table
from stages.encoder.tokenizer import (
    SentenceTokenizer,
    load_tokenizer,
    pad,
    readable_errors,
    token_budget_batches,
)
from stages.errors import UserError
from stages.kinds import Kinds, kind_of_each
from stages.rows import unit_rows

# Rows tokenised, sorted by length and embedded together: long enough that sorting leaves under
# 2% padding, short enough that tokenising one window hides behind computing the one before.
WINDOW_ROWS = 4096


class Encoder(nn.Module):
    """Token ids to sentence vectors, before any training head."""

    def __init__(
        self,
        backbone: Any,
        tokenizer: SentenceTokenizer,
        settings: EncoderSettings,
        unused_weights: dict[str, Tensor],
        dense: nn.Sequential,
    ) -> None:
        super().__init__()
        self.unused_weights = unused_weights
        self.backbone = backbone
        self.dense = dense
        self.tokenizer = tokenizer
        self.settings = settings
        self.num_parameters = sum(p.numel() for p in self.parameters())
        self.arithmetic = ""  # how matrices are multiplied, for the log; see `load_for_inference`

    @property
    def dimension(self) -> int:
        last = [*self.dense][-1:]
        if last:
            return int(cast(Dense, last[0]).linear.out_features)
        return int(self.backbone.config.hidden_size)

    @property
    def num_layers(self) -> int:
        return int(self.backbone.config.num_hidden_layers)

    @property
    def device(self) -> torch.device:
        return next(self.backbone.parameters()).device

    def forward(self, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Pooled sentence vectors (B, D) float32, not normalised.

        Args:
            ids_BL: token ids, int64.
            mask_BL: int64, 1 where there is a token, 0 where there is padding.
        """
        if isinstance(self.backbone, StaticTable) and self.backbone.dtype == torch.float32:
            means_BD: Tensor = self.dense(self.backbone.means(ids_BL, mask_BL))
            return means_BD
        return self.pool(self.states(ids_BL, mask_BL), ids_BL, mask_BL)

    def states(self, ids_BL: Tensor, mask_BL: Tensor, positions_BL: Tensor | None = None) -> Tensor:
        """Token states (B, L, D) of the last layer, float32; with pooling: first-last the mean of
        the first and the last layer's.

        Args:
            positions_BL: position ids counted from 0, where they are not 0 to L - 1.
        """
        # Without padding no mask is needed, and attention takes its fastest kernel.
        mask = None if bool(mask_BL.all()) else mask_BL
        inputs: dict[str, Any] = {"input_ids": ids_BL, "attention_mask": mask}
        if getattr(self.backbone.config, "use_cache", False):
            inputs["use_cache"] = False  # of a decoder: keys and values that nobody reads again
        if positions_BL is not None:
            inputs["position_ids"] = positions_BL + position_offset(self.backbone.config.to_dict())
        if self.settings.pooling == "first-last":
            layers = self.backbone(**inputs, output_hidden_states=True).hidden_states
            return (layers[1].float() + layers[-1].float()) / 2
        states_BLD: Tensor = self.backbone(**inputs).last_hidden_state
        return states_BLD.float()

    def pool(self, states_BLD: Tensor, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Sentence vectors (B, D) of token states, through the Dense modules."""
        found: Tensor = self.dense(self._pooled(states_BLD, ids_BL, mask_BL))
        return found

    def _pooled(self, states_BLD: Tensor, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        if self.settings.pooling == "cls":
            return states_BLD[:, 0]
        if self.settings.pooling in ("mean", "first-last"):
            weights_BL1 = mask_BL.unsqueeze(-1).to(states_BLD.dtype)
            return (states_BLD * weights_BL1).sum(1) / weights_BL1.sum(1).clamp(min=1)
        rows_B = torch.arange(len(ids_BL), device=ids_BL.device)
        if self.settings.pooling == "last":  # padding is on the right
            return states_BLD[rows_B, mask_BL.sum(1) - 1]
        assert self.settings.pooling == "mask", self.settings.pooling
        is_mask_BL = (ids_BL == self.tokenizer.mask_id).to(torch.int64)
        if self.tokenizer.mask_is_last:
            position_B = is_mask_BL.shape[1] - 1 - is_mask_BL.flip(1).argmax(1)
        else:
            position_B = is_mask_BL.argmax(1)
        return states_BLD[rows_B, position_B]

    def encode(
        self,
        texts: Sequence[str],
        kinds: Kinds = None,
        count: Callable[[int, int], None] | None = None,
    ) -> np.ndarray:
        """Vectors (N, D) float32 of `texts`, in order, in evaluation mode, not normalised; zeros of
        texts without any token, such as blank ones where no special tokens stand around.

        Tokenises the next window in a background thread while this one is computed, sorts each
        window by token count and cuts batches by token budget.

        Args:
            kinds: of the texts, for their prompts.
            count: told the tokens and the positions, padding included, of every batch.
        """
        out = np.zeros((len(texts), self.dimension), dtype=np.float32)
        most = self.settings.batch_tokens(self.device.type)
        was_training = self.training
        if was_training:  # not always: walking through all modules twice takes 1 ms of 6
            self.eval()
        with torch.inference_mode():
            for start, rows in self._tokenised_windows(texts, kinds):
                lengths = np.fromiter((len(row) for row in rows), np.int64, count=len(rows))
                some = np.flatnonzero(lengths)
                for places in token_budget_batches(lengths[some], most):
                    batch = some[places]
                    ids, mask = pad([rows[i] for i in batch], self.tokenizer.pad_id)
                    if count is not None:
                        count(int(lengths[batch].sum()), ids.size)
                    ids_BL = torch.from_numpy(ids).to(self.device, non_blocking=True)
                    mask_BL = torch.from_numpy(mask).to(self.device, non_blocking=True)
                    out[start + batch] = self(ids_BL, mask_BL).cpu().numpy()
        if was_training:
            self.train()
        return out

    def encode_unit(self, texts: Sequence[str], kinds: Kinds = None) -> np.ndarray:
        """`encode`, with rows scaled to length 1, so that dot products are cosines."""
        return unit_rows(self.encode(texts, kinds))

    def _tokenised_windows(
        self, texts: Sequence[str], kinds: Kinds
    ) -> Iterator[tuple[int, list[np.ndarray]]]:
        if len(texts) <= WINDOW_ROWS:  # a thread would add 1.3 ms to one sentence's 9
            yield 0, self.tokenizer(texts, kinds)
            return
        each = None if kinds is None else kind_of_each(kinds, len(texts))
        starts = range(0, len(texts), WINDOW_ROWS)
        with ThreadPoolExecutor(max_workers=1) as pool:
            pending = None
            for start in starts:
                window = slice(start, start + WINDOW_ROWS)
                upcoming = pool.submit(self.tokenizer, texts[window], each and each[window])
                if pending is not None:
                    yield pending[0], pending[1].result()
                pending = (start, upcoming)
            if pending is not None:
                yield pending[0], pending[1].result()


def load_encoder(settings: EncoderSettings) -> Encoder:
    """Loads backbone and tokenizer, keeps `settings.layers` or their table, moves it to the device.

    Weights are read from safetensors only. The model is in evaluation mode.

    Raises:
        UserError: no such model, no safetensors, no pooling known, or see
            `check_config`.
    """
    original, settings = settings, resolved(settings)
    places = read_pipeline(described_in(settings)).dense if original.pooling == "auto" else ()
    tokenizer = load_tokenizer(settings)
    if settings.is_static:
        table = token_table(load_encoder(original.model_copy(update={"layers": None})))
        settings = settings.model_copy(update={"pooling": "mean"})
        encoder = Encoder(StaticTable(table), tokenizer, settings, {}, nn.Sequential())
    else:
        backbone, unused = load_backbone(settings)
        encoder = Encoder(backbone, tokenizer, settings, unused, load_dense(settings, places))
    return encoder.to(pick_device(settings.device)).eval()


def load_for_inference(settings: EncoderSettings) -> Encoder | PipelineEncoder:
    """`load_encoder`, with weights cast to the type that the forward pass is computed in and, on a
    CPU, packed for it where that is not slower; by sentence-transformers itself where a pipeline
    has what our encoder does not know. It can't be trained or saved."""
    found, device = resolved(settings), pick_device(settings.device)
    dtype = computed_type(settings.precision, device)
    encoder: Encoder | PipelineEncoder
    if found.pooling == "pipeline":
        table = None if found.encode_arguments else load_static(found, device)
        encoder = table or PipelineEncoder(found, device, dtype)
    else:
        encoder = load_encoder(settings)
        cast_weights(encoder.backbone, dtype)
        if device.type == "cpu":
            encoder.arithmetic = pack_linears(encoder.backbone)
    if dtype != DTYPES[settings.precision]:
        encoder.arithmetic += f"; {NOT_HERE.format(settings.precision)}"
    return encoder


def load_told(settings: EncoderSettings, work: Work) -> Encoder | PipelineEncoder:
    """`load_for_inference` for a stage, whose log says how vectors are computed."""
    encoder = load_for_inference(settings)
    if encoder.arithmetic:
        work.say(encoder.arithmetic, important="WARNING" in encoder.arithmetic)
    return encoder


def pick_device(device: str) -> torch.device:
    """The device that `device` names; auto takes a GPU when there is one.

    Raises:
        UserError: this process has no GPU, and is to use one.
    """
    there = torch.cuda.is_available()
    if device == "auto":
        return torch.device("cuda" if there else "cpu")
    if device == "cuda" and not there:
        raise UserError(
            "device: cuda, but this process has no GPU, or its torch none that it can use; set "
            "device: auto"
        )
    return torch.device(device)


def load_backbone(settings: EncoderSettings) -> tuple[Any, dict[str, Tensor]]:
    """The transformer with the layers that are kept, and the weights that no pooling here reads.

    The latter are a pretraining head's. They are written back when the encoder is saved, so that
    other libraries do not complain about missing weights.
    """
    from transformers import AutoModel

    backbone, about = load_pretrained(AutoModel, settings, output_loading_info=True)
    unused: dict[str, Tensor] = {}
    if getattr(backbone, "pooler", None) is not None:
        whole = {f"pooler.{k}": v.clone() for k, v in backbone.pooler.state_dict().items()}
        if not whole.keys() & about["missing_keys"]:  # else it was just made up at random
            unused = whole
        backbone.pooler = None
    check_config(settings, backbone.config.to_dict())
    if settings.layers is not None:
        keep_layers(backbone, settings)
    return backbone, unused


def load_pretrained(kind: Any, settings: ModelSettings, **options: Any) -> Any:
    """`kind` (a transformers Auto class) from float32 safetensors, with errors for people."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # it would stand between the lines of a command
    with readable_errors(settings.model):
        return kind.from_pretrained(
            str(model_folder(settings.model) or settings.model),
            revision=settings.commit,
            trust_remote_code=settings.trust_remote_code,
            use_safetensors=True,
            dtype=torch.float32,
            **options,
        )


def set_dropout(backbone: nn.Module, rate: float) -> None:
    """Sets every dropout of a transformers backbone, attention included."""
    for module in backbone.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
        for name in ("attention_dropout", "dropout"):  # the latter is Longformer's
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, rate)


def drops_out(backbone: nn.Module) -> bool:
    """Whether any dropout of a transformers backbone has a rate above 0."""
    rates = (
        getattr(module, name, None)
        for module in backbone.modules()
        for name in ("p", "attention_dropout", "dropout")
    )
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def keep_layers(backbone: Any, settings: EncoderSettings) -> None:
    """Keeps only some layers of a transformer stack, and says so in its config."""
    total = backbone.config.num_hidden_layers
    layers = kept_layers(settings, backbone.config.to_dict() | {"num_hidden_layers": total})
    assert layers is not None
    parent, attribute = layer_stack(backbone)
    stack = getattr(parent, attribute)
    kept = nn.ModuleList([stack[i] for i in layers])
    for place, layer in enumerate(kept):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):  # a decoder's: its place in the cache of keys
                module.layer_idx = place  # type: ignore[assignment]
    setattr(parent, attribute, kept)
    backbone.config.num_hidden_layers = len(layers)
    for name, each in vars(backbone.config).items():  # layer_types, Longformer's attention_window
        of_layers = "layer" in name or "window" in name
        if of_layers and isinstance(each, list) and len(each) == total:
            setattr(backbone.config, name, [each[i] for i in layers])


def freeze_layers(backbone: Any, num_layers: int) -> None:
    """Only the layers after the first ones have gradients: not the embeddings, and nothing that
    several layers may have in common (MPNet's biases), as it would be trained through all of them.
    """
    parent, attribute = layer_stack(backbone)
    backbone.requires_grad_(False)
    getattr(parent, attribute)[num_layers:].requires_grad_(True)


def layer_stack(backbone: Any) -> tuple[nn.Module, str]:
    """The module that has a transformer's layers, and its attribute that they are in."""
    for parent in backbone.modules():
        for attribute, child in parent.named_children():
            is_list = isinstance(child, nn.ModuleList)
            if is_list and len(child) == backbone.config.num_hidden_layers:
                return parent, attribute
    raise UserError(f"layers: {type(backbone).__name__} has no layer stack that is known here")
