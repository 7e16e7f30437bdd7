"""Encoders without layers: a table of token vectors, averaged (`layers: 0`).

They begin as Model2Vec's do (Tulkens and van Dongen, 2024): each token alone through the whole
model, common tokens weighed down by Zipf's law. What training makes of the table is saved as
sentence-transformers' StaticEmbedding, which is how it is used.
"""

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from stages.encoder.files import read_modules
from stages.encoder.modules import TRUSTED, cut_to
from stages.encoder.pipeline import PipelineEncoder, pipeline_folder
from stages.encoder.settings import EncoderSettings
from stages.encoder.tokenizer import readable_errors
from stages.kinds import Kind

if TYPE_CHECKING:
    from stages.encoder.model import Encoder

# a of the weight a / (a + p) of a token of frequency p (SIF, Arora et al. 2017), as in Model2Vec
SMOOTHING = 1e-4
BATCH_TOKENS = 1024
TEXTS_AT_ONCE = 4096  # are tokenised and looked up
WEIGHTS = "embedding.weight"
MODULE = "sentence_transformers.models.StaticEmbedding"


class StaticTable(nn.Module):
    """Stands where an encoder has its transformer: a token's state is its row, whatever is around.

    Args:
        table_VD: float32.
    """

    def __init__(self, table_VD: Tensor) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(table_VD, freeze=False)
        about = {"hidden_size": table_VD.shape[1], "num_hidden_layers": 0}
        self.config = SimpleNamespace(**about, to_dict=lambda: about)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Any:
        return SimpleNamespace(last_hidden_state=self.embedding(input_ids))

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    def means(self, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """(B, D): what mean pooling gives, but for rounding, in one pass without states (B, L, D)
        in between, which took a third of the time that encoding takes. Training reads states."""
        weights_BL = mask_BL / mask_BL.sum(1, keepdim=True).clamp(min=1)
        starts_B = torch.arange(len(ids_BL), device=ids_BL.device) * ids_BL.shape[1]
        return F.embedding_bag(
            ids_BL.flatten(), self.embedding.weight, starts_B, mode="sum",
            per_sample_weights=weights_BL.flatten(),
        )  # fmt: skip


def token_table(whole: "Encoder") -> Tensor:
    """(V, D) float32: every token of the vocabulary alone through `whole`, weighed.

    Tokens are taken to be numbered by frequency, and that to follow Zipf's law: p_i is
    proportional to 1 / (i + 2). Rows have a mean length of 1.
    """
    tokenizer, rows = whole.tokenizer, []
    around = [torch.tensor(ids, dtype=torch.int64) for ids in (tokenizer.prefix, tokenizer.suffix)]
    with torch.inference_mode():
        count = whole.backbone.get_input_embeddings().num_embeddings  # ids may have gaps
        for ids in torch.arange(count).split(BATCH_TOKENS):
            before, after = (x.expand(len(ids), -1) for x in around)
            ids_BL = torch.cat([before, ids[:, None], after], 1).to(whole.device)
            rows.append(whole(ids_BL, torch.ones_like(ids_BL)).cpu())
    table = torch.cat(rows).clone()
    p = 1 / (torch.arange(len(table)) + 2)
    table *= (SMOOTHING / (SMOOTHING + p / p.sum()))[:, None]
    return table / table.norm(dim=1).mean()


def save_static(encoder: "Encoder", weights: dict[str, Tensor], folder: Path) -> None:
    """Writes a table as a sentence-transformers folder; Dense modules are part of the table then.

    Args:
        weights: of the encoder by name (`Engine.encoder_weights`).
    """
    from tokenizers import Tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    table = weights[WEIGHTS]
    for number, _ in enumerate(encoder.dense):  # linear: the mean of maps is the map of the mean
        table = table @ weights[f"dense.{number}.linear.weight"].T
    save_file({WEIGHTS: table.contiguous()}, folder / "model.safetensors")
    rust = Tokenizer.from_str(encoder.tokenizer.pretrained.backend_tokenizer.to_str())
    rust.no_truncation()
    rust.no_padding()
    rust.save(str(folder / "tokenizer.json"))
    modules = [{"idx": 0, "name": "0", "path": "", "type": MODULE}]
    (folder / "modules.json").write_text(json.dumps(modules, indent=2) + "\n")


class StaticEncoder(PipelineEncoder):
    """A saved table, computed here: sentence-transformers takes twice as long (docs/results.md), as
    it tokenises 32 texts at a time and looks at each for addresses and files first.

    Args:
        table_VD: float32, on the device. tokenizer: its file. normalizes: whether Normalize is
            behind it.
    """

    def __init__(
        self, settings: EncoderSettings, table_VD: Tensor, tokenizer: Path, normalizes: bool
    ) -> None:
        from tokenizers import Tokenizer

        with readable_errors(settings.model):
            self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._tokenizer.no_padding()
        self._table_VD, self._normalizes = table_VD, normalizes
        self.settings, self.device = settings, table_VD.device
        self.num_parameters, self.num_layers = table_VD.numel(), 0
        self.dimension = table_VD.shape[1]
        self.arithmetic = "means of a table's rows, in float32"

    def _encode_kind(self, texts: Sequence[str], kind: Kind | None) -> np.ndarray:
        out = np.empty((len(texts), self.dimension), dtype=np.float32)
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            window = [self._prompt(kind) + text for text in texts[start : start + TEXTS_AT_ONCE]]
            found = self._tokenizer.encode_batch_fast(window, add_special_tokens=False)
            rows = [encoding.ids for encoding in found]
            ends = np.cumsum([len(row) for row in rows])
            ids = np.fromiter(chain.from_iterable(rows), np.int64, count=ends[-1])
            places = (ids, np.concatenate([[0], ends[:-1]]))
            with torch.inference_mode():
                tensors = (torch.from_numpy(x).to(self.device) for x in places)
                means = F.embedding_bag(next(tensors), self._table_VD, next(tensors), mode="mean")
                means = F.normalize(means) if self._normalizes else means
            out[start : start + len(window)] = means.cpu().numpy()
        return out


def load_static(settings: EncoderSettings, device: torch.device) -> StaticEncoder | None:
    """The encoder of a model that is a saved table, and nothing but its length behind it."""
    folder = pipeline_folder(settings)
    modules = read_modules(folder)
    kinds = [one["type"].rpartition(".")[2] for one in modules]
    if kinds not in (["StaticEmbedding"], ["StaticEmbedding", "Normalize"]):
        return None
    own = folder / modules[0]["path"]
    weights, tokens = own / "model.safetensors", own / "tokenizer.json"
    trusted = all(one["type"].startswith(TRUSTED) for one in modules)
    if cut_to(folder) or not (trusted and weights.is_file() and tokens.is_file()):
        return None
    with readable_errors(settings.model), safe_open(weights, "pt") as opened:
        if WEIGHTS not in {*opened.keys()}:  # Model2Vec's own file
            return None
        table = opened.get_tensor(WEIGHTS).float().to(device)
    return StaticEncoder(settings, table, tokens, normalizes=len(kinds) > 1)
