"""Sentences one after the other in one row: a forward pass without padding, for training on a CPU.

Matrix products are of all tokens of a batch at once; attention alone goes back to sentences.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from stages.encoder.model import Encoder
from stages.encoder.tokenizer import pad

# Tokens of a row are a multiple of it. Products of ever other sizes cost 0.8 GiB more after 220
# steps of 64 sentences, as oneDNN keeps what it made for each, and a tenth of the time.
ROUND = 32
SAMPLE = ("a sentence", "another one, of other length", "more")


@dataclass(frozen=True)
class Part:
    """Sentences (b of them, of at most L tokens, N in all) whose attention is computed together.

    Attributes:
        places_bL: of each token among their N in the packed row; anywhere where there is none.
        is_token_bL: bool. where_N: of the places b L, those that have a token.
    """

    places_bL: Tensor
    is_token_bL: Tensor
    where_N: Tensor


class _Padded(torch.autograd.Function):
    """Rows (N, ...) to (b, L, ...), with any of them where there is no token; `_Rows` reverses it.

    The gradient of an index adds up, one after the other, though no row is taken twice: that of
    these two takes rows, too. Nothing may depend on what is not there.
    """

    @staticmethod
    def forward(ctx: Any, x_N: Tensor, part: Part) -> Tensor:
        ctx.part = part
        return x_N.index_select(0, part.places_bL.flatten()).unflatten(0, part.places_bL.shape)

    @staticmethod
    def backward(ctx: Any, grad_bL: Tensor) -> tuple[Tensor, None]:
        return grad_bL.flatten(0, 1).index_select(0, ctx.part.where_N), None


class _Rows(torch.autograd.Function):
    """(b, L, ...) to the rows (N, ...) of tokens."""

    @staticmethod
    def forward(ctx: Any, x_bL: Tensor, part: Part) -> Tensor:
        ctx.part = part
        return x_bL.flatten(0, 1).index_select(0, part.where_N)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None]:
        part = ctx.part
        grad_bL = grad_N.index_select(0, part.places_bL.flatten())
        grad_bL = grad_bL.unflatten(0, part.places_bL.shape)
        grad_bL[~part.is_token_bL] = 0.0
        return grad_bL, None


class PackedAttention(TorchFunctionMode):
    """Lets each token of a packed row (1, T) attend to its own sentence only; 0 for spare ones."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        self._parts = parts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is not F.scaled_dot_product_attention:
            return func(*args, **options)
        if len(args) != 3 or options.pop("attn_mask", None) is not None or options.get("is_causal"):
            raise RuntimeError("attention over a packed row that leaves more out than other rows")

        def attended(part: Part, x_Nhd: Tensor) -> Tensor:
            whole = bool(part.is_token_bL.all())  # without a mask attention has its fastest kernel
            options["attn_mask"] = None if whole else part.is_token_bL[:, None, None, :]
            x_bhLd = _Padded.apply(x_Nhd, part).transpose(1, 2)
            states_bhLd = func(*x_bhLd.split([x.shape[1] for x in args], dim=1), **options)
            states_Nhd: Tensor = _Rows.apply(states_bhLd.transpose(1, 2), part)
            return states_Nhd

        # query, key and value beside each other, so that they are taken together
        rows_Thd = torch.cat([x[0].transpose(0, 1) for x in args], dim=1)
        lengths = [len(part.where_N) for part in self._parts]
        spare = len(rows_Thd) - sum(lengths)
        *rows, _ = rows_Thd.split([*lengths, spare])
        found_Nhd = torch.cat([attended(*one) for one in zip(self._parts, rows, strict=True)])
        return F.pad(found_Nhd, (0, 0, 0, 0, 0, spare)).transpose(0, 1)[None]


def packed_length(num_tokens: int) -> int:
    """Of the row that so many tokens are packed in."""
    return -(-num_tokens // ROUND) * ROUND


def packed_states(
    encoder: Encoder, ids_BL: Tensor, mask_BL: Tensor, groups: Sequence[Tensor]
) -> Tensor:
    """Token states (B, L, D) as `Encoder.states` has them, and 0 where there is no token.

    Args:
        mask_BL: int64, padding on the right.
        groups: row numbers, each once: whose attention is computed together.
    """
    is_token_BL, num_tokens = mask_BL.bool(), int(mask_BL.sum())
    counted_L = torch.arange(mask_BL.shape[1], device=mask_BL.device)
    parts, rows_N, positions_N = [], [], []
    for rows in groups:
        lengths = mask_BL[rows].sum(1)
        longest = int(lengths.max())
        is_token, positions = is_token_BL[rows, :longest], counted_L[:longest]
        places = (lengths.cumsum(0) - lengths)[:, None] + positions
        where_N = is_token.flatten().nonzero().flatten()
        parts.append(Part(places.clamp(max=len(where_N) - 1), is_token, where_N))
        rows_N.append(rows.repeat_interleave(lengths))
        positions_N.append(positions.expand_as(is_token)[is_token])
    where = (torch.cat(rows_N), torch.cat(positions_N))
    spare = (0, packed_length(num_tokens) - num_tokens)
    ids_1T, positions_1T = (F.pad(x, spare)[None] for x in (ids_BL[where], where[1]))
    with PackedAttention(parts):
        states_ND = encoder.states(ids_1T, torch.ones_like(ids_1T), positions_1T)[0, :num_tokens]
    empty_BLD = states_ND.new_zeros(*ids_BL.shape, states_ND.shape[1])
    return empty_BLD.index_put(where, states_ND)


def can_pack(encoder: Encoder) -> bool:
    """Whether packed sentences have the states that they have alone: tried with three.

    Not where a model takes no position ids, looks only back (decoders), has windows, which see a
    row's and not a sentence's ends once it is long, or has values of another width than its keys.

    Args:
        encoder: in evaluation mode.
    """
    config = encoder.backbone.config.to_dict()
    windows = {*(config.get("layer_types") or [])} - {"full_attention"}
    takes = inspect.signature(encoder.backbone.forward).parameters
    if config.get("sliding_window") or windows or "position_ids" not in takes:
        return False
    sample = pad(encoder.tokenizer(SAMPLE), encoder.tokenizer.pad_id)
    ids_BL, mask_BL = (torch.from_numpy(x).to(encoder.device) for x in sample)
    with torch.inference_mode():
        try:
            packed = packed_states(encoder, ids_BL, mask_BL, torch.arange(len(SAMPLE)).split(2))
        except (AttributeError, RuntimeError, TypeError):
            return False
        alone = encoder.states(ids_BL, mask_BL)
    similarity = F.cosine_similarity(packed, alone, dim=-1)[mask_BL.bool()]
    return bool(similarity.min() > 0.999)
