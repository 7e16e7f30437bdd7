"""Encoders without layers: a table of token vectors, averaged (`layers: 0`).

They begin as Model2Vec's do (Tulkens and van Dongen, 2024): each token alone through the whole
model, common tokens weighed down by Zipf's law. What training makes of the table is saved as
sentence-transformers' StaticEmbedding, which is how it is used.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

if TYPE_CHECKING:
    from stages.encoder.model import Encoder

# a of the weight a / (a + p) of a token of frequency p (SIF, Arora et al. 2017), as in Model2Vec
SMOOTHING = 1e-4
BATCH_TOKENS = 1024


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
    table = weights["embedding.weight"]
    for number, _ in enumerate(encoder.dense):  # linear: the mean of maps is the map of the mean
        table = table @ weights[f"dense.{number}.linear.weight"].T
    save_file({"embedding.weight": table.contiguous()}, folder / "model.safetensors")
    rust = Tokenizer.from_str(encoder.tokenizer.pretrained.backend_tokenizer.to_str())
    rust.no_truncation()
    rust.no_padding()
    rust.save(str(folder / "tokenizer.json"))
    module = "sentence_transformers.models.StaticEmbedding"
    modules = [{"idx": 0, "name": "0", "path": "", "type": module}]
    (folder / "modules.json").write_text(json.dumps(modules, indent=2) + "\n")
