"""The model card of an exported student."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from stages.contract import StudentPart
from stages.export.licence import KEYS, UNKNOWN
from stages.kinds import Kind
from stages.plain import as_yaml

NO_PROMPTS: Mapping[Kind, str] = MappingProxyType({})

RANKS_CARD = """
With the rank vectors that lie beside it (RankEncoder, Eq. 7), Sentray installed:

```python
from stages.ranks.similarity import load_student
print(load_student("path/to/this/folder").similarity(["one sentence"], ["another sentence"]))
```
"""

ALIGNED_CARD = """
Its vectors are in the space of its teacher {teacher}: what the teacher has embedded can be searched
with this student.
"""

KINDS_CARD = """
Queries and documents have prompts of their own, {query} and {document}. For search:

```python
queries = model.encode_query(["what is looked for"])
documents = model.encode_document(["a text", "another text"])
print(model.similarity(queries, documents))
```
"""

CUT_CARD = """
Its vectors may be cut to their leading {widths} coordinates:
`SentenceTransformer("path/to/this/folder", truncate_dim={least})`.
"""


def model_card(
    name: str,
    summary: str,
    data: dict[str, Any],
    has_ranks: bool,
    licences: Sequence[Mapping[str, str]] = (),
    table: str = "",
    parts: Sequence[StudentPart] = (),
    aligned_to: str = "",
    widths: Sequence[int] = (),
    prompts: Mapping[Kind, str] = NO_PROMPTS,
    trusts: bool = False,
) -> str:
    """Markdown: what the student is, what it learned from, how, and its figures where known.

    Args:
        summary: the recipe without places, storage and addresses, as YAML.
        data: the sentences' counts (`kept`, `read`, `rejected`).
        licences: of the models that it comes from, the base model first (see `licences`).
        parts: variants that were asked for.
        aligned_to: the teacher in whose space the student stays.
        widths: that vectors may be cut to.
        prompts: of queries and documents, where these are two kinds of sentence.
        trusts: whether the model has code of its own, which the folder carries.
    """
    shown = {kind: f"`{text!r}`" if text else "none" for kind, text in prompts.items()}
    uses = KINDS_CARD.format(**shown) if shown else ""
    uses += RANKS_CARD if has_ranks else ""
    uses += ALIGNED_CARD.format(teacher=aligned_to) if aligned_to else ""
    if widths:
        listed = " or ".join(str(width) for width in widths)
        uses += CUT_CARD.format(widths=listed, least=min(widths))
    figures = f"## Figures\n\n```\n{table}\n```\n\n" if table else ""
    rejected = ", ".join(f"{count:,} {reason}" for reason, count in data["rejected"].items())
    about = {
        "library_name": "sentence-transformers",
        "pipeline_tag": "sentence-similarity",
        "tags": ["sentence-transformers", "sentray"],
    }
    stated = licences[0] if licences else {}
    front = {key: stated[key] for key in KEYS if key in stated} | about
    return f"""---
{as_yaml(front).rstrip()}
---
# {name}

A sentence encoder trained with Sentray from unlabelled text.

```python
from sentence_transformers import SentenceTransformer
model = SentenceTransformer("path/to/this/folder"{", trust_remote_code=True" if trusts else ""})
print(model.similarity(model.encode(["one sentence"]), model.encode(["another sentence"])))
```
{uses}
{_variants(parts)}{figures}{_licences(licences)}## Data

{data["kept"]:,} sentences from {data["read"]:,} texts; dropped: {rejected or "none"}.

## Recipe

```yaml
{summary.rstrip()}
```
"""


def _variants(parts: Sequence[StudentPart]) -> str:
    published = [part for part in parts if not part.refused]
    if not published:
        return ""
    lines = "\n".join(f"model = {part.usage}  # {part.name}" for part in published)
    return f"""## Variants

What each keeps of the student, and how fast it is, is under Figures. The backends `onnx` and
`openvino` come with `sentence-transformers[onnx]` and `[openvino]`.

```python
{lines}
```

"""


def _licences(licences: Sequence[Mapping[str, str]]) -> str:
    """A line for each model; a model without a stated licence is said to have an unknown one."""
    if not licences:
        return ""
    lines = [f"- {_origin(one)}: {_licence(one)}" for one in licences]
    return "## Licence\n\nAs the cards of the models state it that this student comes from:\n\n" + (
        "\n".join(lines) + "\n\n"
    )


def _origin(one: Mapping[str, str]) -> str:
    return f"{one['what']} ({one['model']})" if one["model"] else f"{one['what']} (vectors only)"


def _licence(one: Mapping[str, str]) -> str:
    stated = [one[key] for key in KEYS if key in one]
    return ", ".join(stated) or f"{UNKNOWN}: no card that states one was found"
