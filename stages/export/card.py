"""The model card of an exported student."""

from typing import Any

RANKS_CARD = """
With the rank vectors that lie beside it (RankEncoder, Eq. 7), Sentray installed:

```python
from stages.ranks.similarity import load_student
print(load_student("path/to/this/folder").similarity(["one sentence"], ["another sentence"]))
```
"""


def model_card(
    name: str, summary: str, data: dict[str, Any], has_ranks: bool, table: str = ""
) -> str:
    """Markdown: what the student is, what it learned from, how, and its figures where known.

    Args:
        summary: the recipe without places, storage and addresses, as YAML.
        data: the sentences' counts (`kept`, `read`, `rejected`).
    """
    ranks = RANKS_CARD if has_ranks else ""
    figures = f"## Figures\n\n```\n{table}\n```\n\n" if table else ""
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
{ranks}
{figures}## Data

{data["kept"]:,} sentences from {data["read"]:,} texts; dropped: {rejected or "none"}.

## Recipe

```yaml
{summary.rstrip()}
```
"""
