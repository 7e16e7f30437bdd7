"""Rewrites that a chat model writes: behind an endpoint, or in vLLM on the cluster's GPUs."""

import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from stages.contract import Resources, Work
from stages.encoder.settings import ModelSettings, describe_model
from stages.endpoint.credentials import read_key, read_variables, secrets_of
from stages.endpoint.settings import Budget, EndpointSettings
from stages.errors import UserError
from stages.packages import need
from stages.rewrite.base import RewriteSource
from stages.rewrite.rewrites import Outcome, Rewrite
from stages.rewrite.stage import Rewrites
from stages.sentences.texts import read_texts
from stages.settings import execution, late

if TYPE_CHECKING:
    from stages.endpoint.journal import Journal
    from stages.planning import Graph
    from stages.rewrite.settings import PerturbSettings

ANSWERS = "answers"  # folder of the journal of chat models' answers, shared by all recipes
# What vLLM, which answers each sentence once and costs nothing a request, does not heed
LIMITS = ("budget", "requests_per_minute", "tokens_per_minute", "max_answers", "answer_limit")
Ref = tuple[int, int]  # shard, place
Sentence = tuple[Ref, str]

# As in DenoSent's appendix: a paraphrase, and a sentence that contradicts the given one or is about
# something else. The appendix's prompt also asks for variety in length.
PROMPT = """\
Rewrite the sentence below in two ways.
sentence1: a paraphrase that keeps its meaning in other words and another structure.
sentence2: a sentence that contradicts it or has nothing to do with it, of about the same length.
Answer with nothing but a JSON object: {{"sentence1": "...", "sentence2": "..."}}
Sentence: {sentence}"""


def plain_field(name: str) -> str:
    """A field's name as answers are compared by: models do not keep to its case and punctuation."""
    return re.sub(r"[\W_]+", "", name).casefold()


class ChatBudget(Budget):
    """What may be spent, where answers have a price of their own."""

    price_per_million_answer_tokens: float | None = execution(
        None, ge=0, description="Price of a million answer tokens, for max_cost."
    )

    @property
    def price_of_answers(self) -> float | None:
        return self.price_per_million_answer_tokens


class Rewriting(RewriteSource, EndpointSettings):
    """Rewrites by a chat model: behind an OpenAI-compatible endpoint, or in vLLM on the cluster."""

    section = "rewriting"
    route = "/chat/completions"
    answer_name = "a chat completion"
    reserved = ("model", "messages", "temperature", "max_tokens", "max_completion_tokens", "n",
                "stream")  # fmt: skip
    reserved_because = (
        "model, prompt, temperature and max_answer_tokens set it, or Sentray relies on one plain "
        "answer a request"
    )
    lowers_tokens = "max_answer_tokens"
    sent = "model, temperature, answer_limit and extra"

    model: str = Field(
        min_length=1,
        description="Name of the model as the endpoint knows it; for vllm: hub id or folder.",
    )
    engine: Literal["endpoint", "vllm"] = Field(
        "endpoint",
        description="endpoint: ask over HTTP. vllm: run the model on the cluster's GPUs.",
    )
    prompt: str = Field(
        PROMPT, description="Prompt with {sentence} in it; write other braces twice."
    )
    rewrite_field: str = Field(
        "sentence1", description="Field of the JSON answer that holds the rewrite."
    )
    negative_field: str | None = Field(
        "sentence2",
        description="Field of the JSON answer that holds the hard negative; null: there is none.",
    )
    temperature: float = Field(1.0, ge=0, description="Sampling temperature of the request.")
    max_answer_tokens: int = Field(
        256, ge=1, description="Most tokens of an answer, thoughts included."
    )
    answer_limit: Literal["max_tokens", "max_completion_tokens"] = execution(
        "max_tokens",
        description="What the request calls max_answer_tokens; OpenAI's reasoning models want "
        "max_completion_tokens.",
    )
    max_answers: int = Field(
        3, ge=1, description="How often to ask for a sentence while its answers cannot be used."
    )
    engine_options: dict[str, Any] = late(
        {},
        description="vllm: options of its engine, such as max_model_len or quantization. They may "
        "change the answers, so the fingerprint covers them.",
    )
    budget: ChatBudget = execution(ChatBudget(), description="Limits on what the stage may spend.")

    @model_validator(mode="after")
    def _prompt_names_the_sentence(self) -> "Rewriting":
        try:
            parsed = string.Formatter().parse(self.prompt)
            fields = [name for _, name, _, _ in parsed if name is not None]
        except ValueError as error:
            raise ValueError(f"prompt: {error}; braces that are text must be doubled") from None
        if fields != ["sentence"]:
            raise ValueError(
                "prompt must contain {sentence} exactly once and no other field "
                f"(it has {fields or 'none'}); braces that are text must be doubled"
            )
        return self

    @model_validator(mode="after")
    def _fields_differ(self) -> "Rewriting":
        named = self.negative_field
        if named is not None and plain_field(named) == plain_field(self.rewrite_field):
            raise ValueError(
                f"negative_field '{named}' and rewrite_field '{self.rewrite_field}' are one field: "
                "answers are read whatever the case and punctuation of their fields; name another"
            )
        return self

    @model_validator(mode="after")
    def _engines_have_their_own(self) -> "Rewriting":
        fields = type(self).model_fields
        for name in LIMITS if self.engine == "vllm" else ():
            if getattr(self, name) != fields[name].get_default():
                raise ValueError(f"{name} is of endpoints; engine: vllm has no use for it")
        if self.engine_options and self.engine != "vllm":
            raise ValueError("engine_options are vLLM's; set engine: vllm, or leave them out")
        return self

    @property
    def most_answer_tokens(self) -> int:
        return self.max_answer_tokens

    @property
    def gives_negatives(self) -> bool:
        return self.negative_field is not None

    def identity(self, where: str = "") -> dict[str, Any]:
        found = super().identity(where)
        if self.engine == "vllm":
            found["model"] = describe_model(ModelSettings(model=self.model))
        return found

    def plan(self, graph: "Graph", whole: "PerturbSettings", where: str) -> None:
        stage = VllmRewrites if self.engine == "vllm" else ChatRewrites
        graph.add(f"perturb:{whole.name}", stage(whole, where, self), ["sentences"], whole.name)


@dataclass(frozen=True)
class ChatRewrites(Rewrites):
    """Asks a chat endpoint. One process is enough: it waits, and its limits hold for the stage."""

    rewriting: Rewriting

    version = 3

    def resources(self) -> Resources:
        # it waits for a network: no core is set aside for that. Two nodes that ask the same model
        # may ask the same: the second one finds the first one's answers
        return Resources(
            cpus=0, exclusive=f"chat {self.rewriting.model}", secrets=secrets_of(self.rewriting)
        )

    def check(self) -> None:
        super().check()
        need("rewrites", f"{self.where}.rewriting", "aiohttp")
        read_variables(self.rewriting)
        read_key(self.rewriting)

    def make(self, work: Work, loaded: Any) -> None:
        from stages.endpoint.journal import Journal
        from stages.rewrite.chat import Answer

        journal = Journal(work.root, ANSWERS, work.owner, Answer)
        source = work.input("sentences")
        waiting: dict[int, tuple[int, list[Rewrite]]] = {}  # a shard's size, and what is there

        def sentences() -> Iterator[Sentence]:
            for number in work.missing_shards():
                texts = read_texts(source, number)
                waiting[number] = len(texts), []
                for place, text in enumerate(texts):
                    yield (number, place), text

        for (number, place), found in self.outcomes(work, journal, sentences()):
            num_texts, rewrites = waiting[number]
            rewrites.append(Rewrite(place, found.text, found.negative, found.reason))
            if len(rewrites) == num_texts:
                work.put_shard(number, self.kept(read_texts(source, number), rewrites))
                del waiting[number]
        self.publish(work)

    def outcomes(
        self, work: Work, journal: "Journal", sentences: Iterator[Sentence]
    ) -> Iterator[tuple[Ref, Outcome]]:
        """What became of every sentence, in any order."""
        from stages.rewrite.client import ChatClient

        key = read_key(self.rewriting, work.secret)
        variables = read_variables(self.rewriting, work.secret)
        client = ChatClient(
            self.rewriting, key, journal, work.say, variables=variables, may_pay=work.may_pay
        )
        return client.run(sentences)


@dataclass(frozen=True)
class VllmRewrites(ChatRewrites):
    """Asks a model that vLLM runs on the cluster's GPUs; the driver stores what comes back."""

    reads_commits = False

    @property
    def packages(self) -> tuple[str, ...]:
        return (*super().packages, "vllm")

    def resources(self) -> Resources:
        return Resources(in_driver=True, exclusive=f"chat {self.rewriting.model}")

    def check(self) -> None:
        Rewrites.check(self)  # it needs neither HTTP nor a key
        read_variables(self.rewriting)
        if find_spec("vllm") is None:
            raise UserError(
                f"{self.where}.rewriting.engine vllm needs vLLM on this machine and the cluster's: "
                "pip install 'ray[llm]'"
            )

    def outcomes(
        self, work: Work, journal: "Journal", sentences: Iterator[Sentence]
    ) -> Iterator[tuple[Ref, Outcome]]:
        from stages.rewrite.vllm import rewritten_offline

        # a model is its weights and its engine's options, not the folder where it lies
        made_by = self.identity({})["perturb.rewriting"]
        engine = {key: made_by[key] for key in ("model", "engine_options")}
        return rewritten_offline(work, self.rewriting, engine, journal, sentences)
