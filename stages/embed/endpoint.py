"""A teacher behind an OpenAI-compatible embeddings endpoint: its settings and its stage.

Memory: about 230 bytes for every vector in the journal, and the vectors of the shards under way.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from stages.contract import Artifact, Fingerprinted, Resources, Shard, Stage, Work
from stages.embed.basis import basis_in, reduced
from stages.endpoint.credentials import read_key, read_variables, secrets_of
from stages.endpoint.settings import EndpointSettings
from stages.kinds import Kind, Kinds, kind_of_each
from stages.packages import need
from stages.rows import npy_bytes
from stages.samples import factor_rows
from stages.sentences.texts import read_kinds, read_texts, texts_of_rows
from stages.settings import added, execution

if TYPE_CHECKING:
    from stages.embed.client import EmbeddingClient
    from stages.embed.embeddings import Vector
    from stages.endpoint.journal import Journal, Spent

EMBEDDINGS = "embeddings"  # folder of the journal of vectors, shared by all recipes


class EmbeddingEndpoint(EndpointSettings):
    """Vectors from an OpenAI-compatible `/v1/embeddings`: hosted, or a server of yours (vLLM, Text
    Embeddings Inference, Ollama, llama.cpp)."""

    section = "endpoint"
    route = "/embeddings"
    answer_name = "a list of embeddings"
    reserved = ("model", "input", "encoding_format", "dimensions")
    reserved_because = "model, prompt, encoding and dimensions set it"
    lowers_tokens = "batch_size"
    sent = "model, dimensions, encoding and extra"

    prompt: str = Field(
        "",
        description="Text in front of every sentence, as the model was trained with, such as "
        "'query: '; its spaces count.",
    )
    prompts: dict[Kind, str] = added(
        {},
        description="The same of sentences of two kinds (`sentences.columns`): {query: 'query: ', "
        "document: 'passage: '}. A kind that is not named has `prompt`.",
    )
    dimensions: int | None = Field(
        None,
        ge=1,
        description="Width of the vectors, of models whose vectors may be cut; null: as the model "
        "gives them, and no such field is sent.",
    )
    encoding: Literal["base64", "float"] = execution(
        "base64",
        description="How vectors are asked for; either is understood, whatever is asked for. "
        "base64: a quarter of the bytes. float: for servers that refuse the word base64.",
    )
    batch_size: int = execution(
        32,
        ge=1,
        le=2048,
        description="Sentences in a request. Servers have limits of their own (Text Embeddings "
        "Inference 32 unless told otherwise, OpenAI 2,048); a request that is refused is halved.",
    )

    def asked(self, text: str, kind: Kind | None = None) -> str:
        """What is sent for a sentence: its prompt and its text."""
        prompt = self.prompts.get(kind) if kind else None
        return (self.prompt if prompt is None else prompt) + text

    @property
    def most_answer_bytes(self) -> int:
        # a number takes up to 25 bytes as text: room for 10,000 of them a sentence
        return (1 << 20) + self.batch_size * (1 << 18)


@dataclass(frozen=True)
class AskedVectors(Stage):
    """Sentences to `factors.npy`: unit rows (N, D) fp16 in each shard, as an endpoint gives them,
    or reduced ones (N, k).

    One process is enough: it waits, and its limits hold for the stage.
    basis: input with what the rows are reduced to; "" keeps them whole. What it asked for is in the
    journal, and counts in the budget.
    """

    settings: EmbeddingEndpoint
    where: str
    basis: str = ""

    kind = "endpoint"
    version = 1
    row_wise = True

    def identity(self, inputs: Mapping[str, Fingerprinted]) -> dict[str, Any]:
        found = self.settings.identity(self.where)
        return {f"endpoint.{key}": value for key, value in found.items() if value is not None}

    def resources(self) -> Resources:
        # no core is set aside for a process that waits for a network. Two nodes that ask the same
        # model may ask the same: the second one finds the first one's vectors
        return Resources(
            cpus=0,
            exclusive=f"embeddings {self.settings.model}",
            secrets=secrets_of(self.settings),
        )

    def check(self) -> None:
        need("endpoints", self.where, "aiohttp")
        read_variables(self.settings)
        read_key(self.settings)

    def width(self) -> int | None:
        return self.settings.dimensions

    def sampled(
        self, work: Work, rows: np.ndarray, has_width: Callable[[int], None]
    ) -> tuple[np.ndarray, dict[str, Any]]:
        sentences, client, journal = work.input("sentences"), *self._opened(work)
        numbers = sentences.shard_numbers
        starts = np.cumsum([0, *map(sentences.shard_rows, numbers)])
        shards = np.searchsorted(starts, rows, side="right") - 1
        places = (rows - starts[shards]).tolist()
        refs = [(numbers[shard], place) for shard, place in zip(shards, places, strict=True)]
        line_of = {ref: line for line, ref in enumerate(refs)}
        texts = self._prompted(*texts_of_rows(sentences, rows.tolist()))
        found = np.empty((0, 0), np.float16)
        # in the order of rows, as `make` reads the answers again
        asked = sorted(zip(refs, texts, strict=True))
        for known, vectors in client.run(asked):
            if not found.size:
                has_width(vectors.shape[1])
                found = np.empty((len(rows), vectors.shape[1]), np.float16)
            found[[line_of[ref] for ref in known]] = vectors
        return found, self._paid(work, client, journal.spent())

    def make(self, work: Work, loaded: Any) -> None:
        source, missing = work.input("sentences"), work.missing_shards()
        client, journal = self._opened(work)
        basis = basis_in(work, self.basis)

        def asked(number: int) -> list[str]:
            return self._prompted(read_texts(source, number), read_kinds(source, number))

        if finished := sorted({*source.shard_numbers} - {*missing}):  # the others must be as wide
            client.known(asked(finished[0])[0])

        def sentences() -> Iterator[tuple[tuple[int, int], str]]:
            for number in missing:
                for place, text in enumerate(asked(number)):
                    yield (number, place), text

        waiting: dict[int, np.ndarray] = {}
        left = {number: source.shard_rows(number) for number in missing}
        for refs, vectors in client.run(sentences()):
            for (number, place), factor in zip(refs, reduced(vectors, basis), strict=True):
                if number not in waiting:
                    shape = source.shard_rows(number), len(factor)
                    waiting[number] = np.empty(shape, np.float16)
                waiting[number][place] = factor
                left[number] -= 1
                if not left[number]:
                    factors = waiting.pop(number)
                    files = {"factors.npy": npy_bytes(factors)}
                    work.put_shard(number, Shard(files, len(factors)))
        work.publish(self._paid(work, client, journal.spent()))

    def _prompted(self, texts: Sequence[str], kinds: Kinds) -> list[str]:
        each = zip(texts, kind_of_each(kinds, len(texts)), strict=True)
        return [self.settings.asked(*one) for one in each]

    def _opened(self, work: Work) -> "tuple[EmbeddingClient, Journal[Vector]]":
        """A client and its journal; what the basis was paid with counts as spent."""
        from stages.embed.client import EmbeddingClient
        from stages.embed.embeddings import Vector
        from stages.endpoint.journal import Journal, Spent

        journal = Journal(work.root, EMBEDDINGS, work.owner, Vector)
        width = 0
        if self.basis:
            figures = work.input(self.basis).stats
            journal.spent().add(Spent(figures["requests"], figures["prompt_tokens"]))
            width = figures["dimensions"]
        key = read_key(self.settings, work.secret)
        variables = read_variables(self.settings, work.secret)
        return EmbeddingClient(
            self.settings, key, journal, work.say, variables=variables, may_pay=work.may_pay,
            width=width,
        ), journal  # fmt: skip

    @staticmethod
    def _paid(work: Work, client: "EmbeddingClient", spent: "Spent") -> dict[str, Any]:
        work.say(f"paid for: {client.summary}", important=True)
        return {"requests": spent.requests, "prompt_tokens": spent.prompt_tokens}

    @classmethod
    def sample(
        cls, artifact: Artifact, open_input: Callable[[str], Artifact], num_rows: int
    ) -> list[str]:
        return factor_rows(artifact.shard_path(artifact.shard_numbers[0], "factors.npy"), num_rows)
