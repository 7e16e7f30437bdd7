"""The student as a sentence-transformers folder with a model card.

The module types are written under their older names, which sentence-transformers 3 to 6 load;
writing four small files keeps its 12-second import out of the stage.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from stages.encoder.settings import EncoderSettings


def export_student(
    model: Path, settings: EncoderSettings, dimension: int, max_length: int, card: str, target: Path
) -> None:
    """Writes `target`, loadable with SentenceTransformer(target).

    Args:
        model: folder with backbone and tokenizer, as training wrote it.
        settings: resolved pooling (cls or mean).
        max_length: tokens read of a sentence when used, as in the evaluation.
        card: the model card, Markdown.
    """
    shutil.copytree(model, target)
    (target / "1_Pooling").mkdir()
    _write(
        target / "1_Pooling" / "config.json",
        {
            "word_embedding_dimension": dimension,
            "pooling_mode_cls_token": settings.pooling == "cls",
            "pooling_mode_mean_tokens": settings.pooling == "mean",
            "pooling_mode_max_tokens": False,
            "pooling_mode_mean_sqrt_len_tokens": False,
        },
    )
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    _write(
        target / "modules.json",
        [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(modules)
        ],
    )
    _write(
        target / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False}
    )
    _write(
        target / "config_sentence_transformers.json",
        {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"},
    )
    (target / "README.md").write_text(card, encoding="utf-8")


def _write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


def model_card(name: str, recipe_yaml: str, data: dict[str, Any], table: str) -> str:
    """Markdown: what the student is, what it learned from, its figures, its whole recipe."""
    rejected = ", ".join(f"{count:,} {reason}" for reason, count in data["rejected"].items())
    return f"""---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
tags: [sentence-transformers, sentray]
---
# {name}

A sentence encoder trained with Sentray from unlabelled text.

```python
from sentence_transformers import SentenceTransformer
model = SentenceTransformer("path/to/this/folder")
print(model.similarity(model.encode(["one sentence"]), model.encode(["another sentence"])))
```

## Figures

```
{table}
```

## Data

{data["kept"]:,} sentences from {data["read"]:,} texts; dropped: {rejected or "none"}.

## Recipe

```yaml
{recipe_yaml.rstrip()}
```
"""
