"""Tiny sentence-transformers pipelines, made by that library itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.models import make_model


def make_decoder(folder: Path) -> Path:
    """A Qwen3 of a few thousand parameters: causal, padded on the left, </s> behind a sentence."""
    from tokenizers import processors
    from transformers import AutoTokenizer

    make_model(folder, kind="Qwen3", num_key_value_heads=1, head_dim=16, pad_token_id=0)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A [SEP]", special_tokens=[("[SEP]", 3)]
    )
    tokenizer.save_pretrained(folder)
    return folder


def make_pipeline(
    folder: Path,
    *behind: Callable[[], Any],
    model: Callable[[Path], Path] = make_model,
    **options: Any,
) -> Path:
    """A sentence-transformers folder with these modules behind a transformer of width 32."""
    import torch
    from sentence_transformers import SentenceTransformer, models

    torch.manual_seed(0)
    first = models.Transformer(str(model(folder / "bare")))
    SentenceTransformer(modules=[first, *(one() for one in behind)], device="cpu", **options).save(
        str(folder / "whole")
    )
    return folder / "whole"


def make_router(folder: Path) -> Path:
    """Two ways through one model, by the argument `task`."""
    from sentence_transformers import SentenceTransformer, models

    ways = {
        name: [models.Transformer(str(make_model(folder / name, seed=seed))), pooling("mean")()]
        for seed, name in enumerate(("query", "document"))
    }
    router = models.Router.for_query_document(ways["query"], ways["document"])
    SentenceTransformer(modules=[router], device="cpu").save(str(folder / "whole"))
    return folder / "whole"


def pooling(mode: Any, **options: Any) -> Callable[[], Any]:
    from sentence_transformers import models

    return lambda: models.Pooling(32, pooling_mode=mode, **options)


def dense(out: int, width: int = 32, **options: Any) -> Callable[[], Any]:
    from sentence_transformers import models

    return lambda: models.Dense(width, out, **options)


def normalize() -> Any:
    from sentence_transformers import models

    return models.Normalize()
