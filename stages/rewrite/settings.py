"""Settings of `perturb`: the sources of rewrites and their filters. Imports nothing heavy.

A recipe may name several sources. Training draws one rewrite of a sentence from all of them.
"""

import re
import string
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from stages.encoder.settings import ModelSettings, describe_model
from stages.errors import UserError
from stages.fields import InputPath
from stages.packages import need
from stages.rewrite.base import RewriteSource
from stages.sentences.settings import SourceKind
from stages.settings import Open, Settings, execution, late
from stages.variables import VARIABLE

if TYPE_CHECKING:
    from stages.planning import Graph

# As in DenoSent's appendix: a paraphrase, and a sentence that contradicts the given one or is about
# something else. The appendix's prompt also asks for variety in length.
PROMPT = """\
Rewrite the sentence below in two ways.
sentence1: a paraphrase that keeps its meaning in other words and another structure.
sentence2: a sentence that contradicts it or has nothing to do with it, of about the same length.
Answer with nothing but a JSON object: {{"sentence1": "...", "sentence2": "..."}}
Sentence: {sentence}"""


class Filters(Settings):
    """Which rewrites are rejected. Lengths and similarities are measured in characters."""

    min_growth: float = Field(
        0.3, ge=0, description="Shortest rewrite, as a multiple of its source."
    )
    max_growth: float = Field(
        3.0, gt=0, description="Longest rewrite, as a multiple of its source."
    )
    max_similarity: float = Field(
        0.98,
        gt=0,
        le=1,
        description="Reject near copies: rewrites with a higher normalised edit similarity to "
        "their source, case and white space aside. 1 rejects exact copies only.",
    )
    max_repeats: int = Field(
        3, ge=1, description="How often in a row one to four words may repeat."
    )
    script: str | None = Field(
        "LATIN",
        description="Unicode script of at least half of the letters; null: any.",
    )
    language: str | None = Field(
        None,
        description="Language that py3langid must find, as an ISO 639-1 code; null: any. Rewrites "
        "of less than 30 characters pass, since it is unsure of them.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> "Filters":
        if self.min_growth > self.max_growth:
            raise ValueError(f"min_growth {self.min_growth} is above max_growth {self.max_growth}")
        return self


class Pairs(RewriteSource):
    """Rewrites from a file of yours: a sentence (or its id) and a rewrite in each row."""

    path: InputPath = Field(
        description="A table file, or a folder whose files are read in name order."
    )
    source: SourceKind | None = Field(None, description="Kind of file; null: told from its suffix.")
    invalid_utf8: Literal["error", "reject"] = Field(
        "error",
        description="What to do with lines that are not UTF-8: stop, or drop and count them.",
    )
    sentence_column: str | None = Field(
        "sentence1", description="Column of the sentence; pairs are joined by its text."
    )
    id_column: str | None = Field(
        None,
        description="Column of the sentence's id in the artifact `sentences`, to join by that "
        "instead.",
    )
    rewrite_column: str = Field("sentence2", description="Column of the rewrite.")
    negative_column: str | None = Field(
        None, description="Column of the hard negative, if there is one."
    )
    unknown: Literal["error", "reject"] = Field(
        "error",
        description="What to do with rows whose sentence is not in the corpus: stop, or drop and "
        "count.",
    )

    @model_validator(mode="after")
    def _one_key(self) -> "Pairs":
        if (self.sentence_column is None) == (self.id_column is None):
            raise ValueError("set either sentence_column or id_column, and the other to null")
        return self

    @property
    def gives_negatives(self) -> bool:
        return self.negative_column is not None

    def plan(self, graph: "Graph", whole: "PerturbSettings", where: str) -> None:
        from stages.rewrite.pairs_stage import JoinedPairs

        stage = JoinedPairs(whole, where, graph.recipe.sentences.unicode)
        graph.add(f"perturb:{whole.name}", stage, ["sentences"], whole.name)


class TranslationModel(ModelSettings):
    prefix: str = Field(
        "",
        description="Text before every sentence: `>>fra<< ` for Marian models with several target "
        "languages, `translate English to German: ` for T5.",
    )


class BackTranslation(RewriteSource):
    """Back-translation: translate to a pivot language and back."""

    to_pivot: TranslationModel = Field(
        TranslationModel(model="Helsinki-NLP/opus-mt-en-zh", prefix=">>cmn_Hans<< "),
        description="Model that translates to the pivot language.",
    )
    from_pivot: TranslationModel = Field(
        TranslationModel(model="Helsinki-NLP/opus-mt-zh-en"),
        description="Model that translates back.",
    )
    engine: Literal["ctranslate2", "transformers"] = Field(
        "ctranslate2",
        description="ctranslate2: fast, for Marian and similar models. transformers: any model.",
    )
    precision: Literal["float32", "bfloat16", "float16", "int8"] = Field(
        "float32", description="Arithmetic of the forward pass; int8 needs ctranslate2."
    )
    num_beams: int = Field(4, ge=1, description="Width of the beam search; 1: greedy.")
    temperature: float | None = Field(
        None,
        gt=0,
        description="Sample tokens at this temperature; null: beam search.",
    )
    top_k: int = Field(
        0, ge=0, description="Sample from this many most likely tokens; 0: from all."
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Sample from the most likely tokens that hold this probability.",
    )
    seed: int = Field(0, ge=0, description="Seed of the sampling.")
    max_growth: float = Field(
        2.0,
        gt=0,
        description="Longest translation in tokens: this many times its source, plus 10.",
    )
    no_repeat_ngram: int = Field(
        4,
        ge=0,
        description="No sequence of this many tokens occurs twice in a translation; 0: no limit.",
    )
    max_length: int = Field(
        128, ge=3, description="Reject a sentence or pivot of more tokens; it is never cut."
    )
    tokens_per_batch: int = execution(
        2048, ge=1, description="Most tokens of one batch, padding included, beams not."
    )
    rows_per_unit: int = execution(
        256, ge=1, description="Sentences between two commits: what a kill can cost at most."
    )
    device: Literal["auto", "cpu", "cuda"] = execution(
        "auto", description="auto: the GPU that Ray assigned, if there is one."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> "BackTranslation":
        if self.temperature is None and (self.top_k or self.top_p < 1):
            raise ValueError("top_k and top_p need a temperature: without one nothing is drawn")
        if self.temperature is not None and self.num_beams > 1:
            raise ValueError("temperature draws tokens and needs num_beams: 1")
        if self.precision == "int8" and self.engine != "ctranslate2":
            raise ValueError("precision int8 needs engine: ctranslate2")
        for model in (self.to_pivot, self.from_pivot):
            if model.recipe_file is not None:
                raise ValueError("a translation model cannot be a recipe's student")
        return self

    def plan(self, graph: "Graph", whole: "PerturbSettings", where: str) -> None:
        from stages.rewrite.translate_stage import FilteredTranslations, Translate

        raw = graph.add(
            f"translate:{whole.name}", Translate(self, where), ["sentences"], whole.name
        )
        stage = FilteredTranslations(whole, where)
        graph.add(f"perturb:{whole.name}", stage, [raw, "sentences"], whole.name)


def check_translation_folder(model: str, folder: Path | None, model_type: str) -> None:
    """Raises UserError where a local Marian folder lacks its vocabularies.

    Without them transformers makes up an empty vocabulary.
    """
    if folder is None or model_type != "marian":
        return
    files = ("source.spm", "target.spm", "vocab.json")
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise UserError(f"model '{model}': the folder lacks {', '.join(missing)}")


def check_translation_packages(model: str, engine: str, model_type: str) -> None:
    """Raises UserError where the packages that a model needs on an engine are not installed."""
    needed = ["ctranslate2"] if engine == "ctranslate2" else []
    if model_type == "marian":
        needed += ["sentencepiece", "sacremoses"]
    if needed:
        need("translation", f"translating with model '{model}'", *needed)


class Budget(Settings):
    """What may be spent on one artifact, over all runs.

    A run that reaches a limit stops. Raise the limit and run again to continue.
    """

    max_requests: int | None = execution(
        None, ge=1, description="Most requests that are answered; null: no limit."
    )
    max_tokens: int | None = execution(
        None, ge=1, description="Most tokens of prompts and answers together; null: no limit."
    )
    max_cost: float | None = execution(
        None, gt=0, description="Highest cost, in the currency of the prices; null: no limit."
    )
    price_per_million_prompt_tokens: float | None = execution(
        None, ge=0, description="Price of a million prompt tokens, for max_cost."
    )
    price_per_million_answer_tokens: float | None = execution(
        None, ge=0, description="Price of a million answer tokens, for max_cost."
    )

    @model_validator(mode="after")
    def _prices(self) -> "Budget":
        prices = (self.price_per_million_prompt_tokens, self.price_per_million_answer_tokens)
        if self.max_cost is not None and None in prices:
            raise ValueError("max_cost needs both prices per million tokens")
        return self


CREDENTIAL_WORDS = {"authorization", "auth", "password", "passwd", "secret", "credential",
                    "credentials", "bearer", "cookie", "apikey"}  # fmt: skip
CREDENTIAL_PAIRS = re.compile(r"(api|access|private|secret|subscription|account|auth)_?keys?(_|$)")
TEXT_TOKENS = {"bos", "eos", "pad", "unk", "sep", "cls", "mask", "stop", "start", "end", "image"}


def _clear_credential(value: Any, inside: bool = False) -> str | None:
    """Where a value that a header or account field is named after stands in clear text.

    Args:
        inside: whether a name above it says so.
    """
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            if (
                found := _clear_credential(item, inside or _names_credential(str(key)))
            ) is not None:
                return f"{key}.{found}".rstrip(".")
        return None
    if not isinstance(value, str) or not value or VARIABLE.search(value):
        return None
    return "" if inside or re.match(r"(bearer|basic)\s+\S", value, re.IGNORECASE) else None


def _names_credential(key: str) -> bool:
    name = re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower())
    words = set(name.split("_"))
    token = "token" in words and not words & TEXT_TOKENS
    return token or bool(words & CREDENTIAL_WORDS) or bool(CREDENTIAL_PAIRS.search(name))


class Rewriting(RewriteSource):
    """Rewrites by a chat model: behind an OpenAI-compatible endpoint, or in vLLM on the cluster."""

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
        256, ge=1, description="Most tokens of an answer; sent as max_tokens."
    )
    extra: dict[str, Any] = late(
        {},
        description="Further fields of the request, sent as they are. ${VARIABLES} are filled in "
        "when the request is sent. The fingerprint covers their names, not their values.",
    )
    max_answers: int = Field(
        3, ge=1, description="How often to ask for a sentence while its answers cannot be used."
    )
    base_url: str = execution(
        "https://api.openai.com/v1",
        description="Address of the endpoint; /chat/completions is added.",
    )
    key_variable: str | None = execution(
        "OPENAI_API_KEY", description="Environment variable that holds the key; null: send no key."
    )
    concurrency: int = execution(32, ge=1, description="Most requests in flight.")
    requests_per_minute: int | None = execution(
        None, ge=1, description="Most requests a minute, of the whole stage; null: no limit."
    )
    tokens_per_minute: int | None = execution(
        None, ge=1, description="Most tokens a minute, of the whole stage; null: no limit."
    )
    timeout_seconds: float = execution(60.0, gt=0, description="Time-out of one request.")
    max_attempts: int = execution(
        6, ge=1, description="How often to send a request that fails while others are answered."
    )
    engine_options: dict[str, Any] = late(
        {},
        description="vllm: options of its engine, such as max_model_len or quantization. They may "
        "change the answers, so the fingerprint covers them.",
    )
    budget: Budget = execution(Budget(), description="Limits on what the stage may spend.")

    @model_validator(mode="after")
    def _address_has_no_secret(self) -> "Rewriting":
        address = urlsplit(self.base_url)
        if address.scheme not in ("http", "https") or not address.netloc:
            raise ValueError("base_url is not an http(s) address such as http://localhost:8000/v1")
        if "@" in address.netloc or address.query:
            raise ValueError(
                "credentials do not belong into base_url (it is saved with every run); put the key "
                "into an environment variable and name that in key_variable"
            )
        return self

    @model_validator(mode="after")
    def _extra_leaves_the_rest_alone(self) -> "Rewriting":
        for name in ("model", "messages", "temperature", "max_tokens", "max_completion_tokens",
                     "n", "stream"):  # fmt: skip
            if name in self.extra:
                raise ValueError(
                    f"extra must not contain '{name}': model, prompt, temperature and "
                    "max_answer_tokens set it, or Sentray relies on one plain answer a request"
                )
        return self

    @model_validator(mode="after")
    def _credentials_are_variables(self) -> "Rewriting":
        for name in ("extra", "engine_options"):
            if where := _clear_credential(getattr(self, name)):
                raise ValueError(
                    f"{name}.{where} looks like a credential, and {name} is saved with every run; "
                    "put it into an environment variable and write ${NAME} here"
                )
        return self

    @model_validator(mode="after")
    def _prompt_names_the_sentence(self) -> "Rewriting":
        try:
            fields = [
                name for _, name, _, _ in string.Formatter().parse(self.prompt) if name is not None
            ]
        except ValueError as error:
            raise ValueError(f"prompt: {error}; braces that are text must be doubled") from None
        if fields != ["sentence"]:
            raise ValueError(
                "prompt must contain {sentence} exactly once and no other field "
                f"(it has {fields or 'none'}); braces that are text must be doubled"
            )
        return self

    @property
    def gives_negatives(self) -> bool:
        return self.negative_field is not None

    def identity(self, where: str = "") -> dict[str, Any]:
        found = super().identity(where)
        if self.engine == "vllm":
            found["model"] = describe_model(ModelSettings(model=self.model))
        return found

    def plan(self, graph: "Graph", whole: "PerturbSettings", where: str) -> None:
        from stages.rewrite.chat_stage import ChatRewrites, VllmRewrites

        stage = (VllmRewrites if self.engine == "vllm" else ChatRewrites)(whole, where)
        graph.add(f"perturb:{whole.name}", stage, ["sentences"], whole.name)


class PerturbSettings(Open):
    """An entry of `perturb`: one source of rewrites and its filters."""

    additions = "rewrites"

    name: str = Field(
        description="Name of the rewrites in node and artifact names.",
        pattern=r"^[a-z0-9][a-z0-9._-]*$",
    )
    pairs: Pairs | None = None
    backtranslation: BackTranslation | None = None
    rewriting: Rewriting | None = None
    filters: Filters = Filters()

    @model_validator(mode="after")
    def _one_source(self) -> "PerturbSettings":
        if len(self._sources) != 1:
            known = ["pairs", "backtranslation", "rewriting"]
            raise ValueError(f"name exactly one of: {', '.join([*known, *self.added_sections])}")
        return self

    @property
    def _sources(self) -> list[RewriteSource]:
        given = [self.pairs, self.backtranslation, self.rewriting, *self.added_sections.values()]
        return [source for source in given if isinstance(source, RewriteSource)]

    @property
    def source(self) -> RewriteSource:
        """The one that is named."""
        return self._sources[0]

    @property
    def gives_negatives(self) -> bool:
        """Whether its rewrites may come with hard negatives."""
        return self.source.gives_negatives
