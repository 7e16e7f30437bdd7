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
    """Sentences (b of them, of at most L tokens) whose attention is computed together.

    Attributes:
        places_bL: of each token in the packed row; anywhere in it where there is none.
        is_token_bL: bool.
    """

    places_bL: Tensor
    is_token_bL: Tensor


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

        def attended(part: Part) -> Tensor:
            whole = bool(part.is_token_bL.all())  # without a mask attention has its fastest kernel
            options["attn_mask"] = None if whole else part.is_token_bL[:, None, None, :]
            inputs = [x[part.places_bL].transpose(1, 2) for x in rows]
            states_bLhd: Tensor = func(*inputs, **options).transpose(1, 2)
            return states_bLhd[part.is_token_bL]

        rows = [x[0].transpose(0, 1) for x in args]  # query, key, value: (T, heads, width)
        found_Nhd = torch.cat([attended(part) for part in self._parts])
        spare = len(rows[0]) - len(found_Nhd)
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
    parts, rows_N, positions_N, start = [], [], [], 0
    for rows in groups:
        lengths = mask_BL[rows].sum(1)
        longest = int(lengths.max())
        is_token, positions = is_token_BL[rows, :longest], counted_L[:longest]
        places = (start + lengths.cumsum(0) - lengths)[:, None] + positions
        parts.append(Part(places.clamp(max=num_tokens - 1), is_token))
        rows_N.append(rows.repeat_interleave(lengths))
        positions_N.append(positions.expand_as(is_token)[is_token])
        start += len(rows_N[-1])
    where = (torch.cat(rows_N), torch.cat(positions_N))
    spare = (0, packed_length(num_tokens) - num_tokens)
    ids_1T, positions_1T = (F.pad(x, spare)[None] for x in (ids_BL[where], where[1]))
    with PackedAttention(parts):
        states_ND = encoder.states(ids_1T, torch.ones_like(ids_1T), positions_1T)[0, :num_tokens]
    empty_BLD = states_ND.new_zeros(*ids_BL.shape, states_ND.shape[1])
    return empty_BLD.index_put(where, states_ND)


def can_pack(encoder: Encoder) -> bool:
    """Whether packed sentences have the states that they have alone: tried with three.

    Not where a model takes no position ids, looks only back (decoders), or has windows, which see a
    row's and not a sentence's ends once it is long.

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
