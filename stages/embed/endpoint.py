"""A teacher behind an OpenAI-compatible embeddings endpoint: its settings and its stage.

Memory: about 230 bytes for every vector in the journal, and the vectors of the shards under way.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import Field

from stages.contract import Artifact, Fingerprinted, Resources, Shard, Stage, Work
from stages.endpoint.credentials import read_key, read_variables, secrets_of
from stages.endpoint.settings import EndpointSettings
from stages.kinds import Kind, kind_of_each
from stages.packages import need
from stages.rows import npy_bytes
from stages.samples import factor_rows
from stages.sentences.texts import read_kinds, read_texts
from stages.settings import added, execution

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
    """Sentences to `factors.npy`: unit rows (N, D) fp16 in each shard, as an endpoint gives them.

    One process is enough: it waits, and its limits hold for the stage.
    """

    settings: EmbeddingEndpoint
    where: str

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

    def make(self, work: Work, loaded: Any) -> None:
        from stages.embed.client import EmbeddingClient
        from stages.embed.embeddings import Vector
        from stages.endpoint.journal import Journal

        source, missing = work.input("sentences"), work.missing_shards()
        journal = Journal(work.root, EMBEDDINGS, work.owner, Vector)
        key = read_key(self.settings, work.secret)
        variables = read_variables(self.settings, work.secret)
        client = EmbeddingClient(self.settings, key, journal, work.say, variables=variables)

        def asked(number: int) -> list[str]:
            texts = read_texts(source, number)
            kinds = kind_of_each(read_kinds(source, number), len(texts))
            return [self.settings.asked(*one) for one in zip(texts, kinds, strict=True)]

        if finished := sorted({*source.shard_numbers} - {*missing}):  # the others must be as wide
            client.known(asked(finished[0])[0])

        def sentences() -> Iterator[tuple[tuple[int, int], str]]:
            for number in missing:
                for place, text in enumerate(asked(number)):
                    yield (number, place), text

        waiting: dict[int, np.ndarray] = {}
        left = {number: source.shard_rows(number) for number in missing}
        try:
            for refs, vectors in client.run(sentences()):
                for (number, place), vector in zip(refs, vectors, strict=True):
                    if number not in waiting:
                        shape = source.shard_rows(number), len(vector)
                        waiting[number] = np.empty(shape, np.float16)
                    waiting[number][place] = vector
                    left[number] -= 1
                    if not left[number]:
                        factors = waiting.pop(number)
                        files = {"factors.npy": npy_bytes(factors)}
                        work.put_shard(number, Shard(files, len(factors)))
        finally:
            journal.flush()
        spent = journal.spent()
        work.say(f"paid for: {client.summary}", important=True)
        work.publish({"requests": spent.requests, "prompt_tokens": spent.prompt_tokens})

    @classmethod
    def sample(
        cls, artifact: Artifact, open_input: Callable[[str], Artifact], num_rows: int
    ) -> list[str]:
        return factor_rows(artifact.shard_path(artifact.shard_numbers[0], "factors.npy"), num_rows)
