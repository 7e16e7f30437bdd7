"""The nodes of rewrites that a chat model writes: behind an endpoint, or vLLM on the cluster."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from stages.contract import Resources, Work
from stages.errors import UserError
from stages.packages import need
from stages.rewrite.rewrites import Rewrite
from stages.rewrite.settings import Rewriting
from stages.rewrite.stage import Rewrites
from stages.sentences.stage import read_texts

ANSWERS = "answers"  # folder of the journal of chat models' answers, shared by all recipes
Ref = tuple[int, int]  # shard, place


@dataclass(frozen=True)
class ChatRewrites(Rewrites):
    """Asks a chat endpoint. One process is enough: it waits, and its limits hold for the stage."""

    @property
    def rewriting(self) -> Rewriting:
        assert self.settings.rewriting is not None
        return self.settings.rewriting

    def resources(self) -> Resources:
        from stages.rewrite.endpoint import variables_of

        name = self.rewriting.key_variable
        names = [*([name] if name else []), *variables_of(self.rewriting)]
        # it waits for a network: no core is set aside for that. Two nodes that ask the same model
        # may ask the same: the second one finds the first one's answers
        return Resources(
            cpus=0, exclusive=f"chat {self.rewriting.model}", secrets=tuple(dict.fromkeys(names))
        )

    def check(self) -> None:
        from stages.rewrite.endpoint import read_key, read_variables

        super().check()
        need("rewrites", f"{self.where}.rewriting", "aiohttp")
        read_variables(self.rewriting)
        read_key(self.rewriting)

    def make(self, work: Work, loaded: Any) -> None:
        from stages.rewrite.client import ChatClient
        from stages.rewrite.endpoint import Secret, variables_of
        from stages.rewrite.journal import Journal

        name = self.rewriting.key_variable
        key = Secret(work.secret(name).strip()) if name else None
        variables = {one: Secret(work.secret(one)) for one in variables_of(self.rewriting)}
        journal, shards = Journal(work.root, ANSWERS, work.owner), OpenShards(self, work)
        client: ChatClient[Ref] = ChatClient(
            self.rewriting, key, journal, work.say, variables=variables
        )
        shards.add_all(client.run(shards.sentences()))
        self.publish(work)


@dataclass(frozen=True)
class VllmRewrites(ChatRewrites):
    """Asks a model that vLLM runs on the cluster's GPUs; the driver stores what comes back."""

    def resources(self) -> Resources:
        return Resources(in_driver=True, exclusive=f"chat {self.rewriting.model}")

    def check(self) -> None:
        from stages.rewrite.endpoint import read_variables

        read_variables(self.rewriting)
        if find_spec("vllm") is None:
            raise UserError(
                f"{self.where}.rewriting.engine vllm needs vLLM on this machine and the cluster's: "
                "pip install 'ray[llm]'"
            )

    def make(self, work: Work, loaded: Any) -> None:
        from stages.rewrite.journal import Journal
        from stages.rewrite.vllm import rewritten_offline

        # a model is its weights and its engine's options, not the folder where it lies
        made_by = self.identity({})["perturb.rewriting"]
        engine = {key: made_by[key] for key in ("model", "engine_options")}
        journal, shards = Journal(work.root, ANSWERS, work.owner), OpenShards(self, work)
        shards.add_all(rewritten_offline(work, self.rewriting, engine, journal, shards.sentences()))
        journal.flush()
        self.publish(work)


@dataclass
class _OpenShard:
    left: int
    texts: list[str]
    rewrites: list[Rewrite] = field(default_factory=list)


class OpenShards:
    """Shards whose sentences are out for rewriting; each is stored when its last one is back."""

    def __init__(self, stage: Rewrites, work: Work) -> None:
        self._stage, self._work = stage, work
        self._open: dict[int, _OpenShard] = {}

    def sentences(self) -> Iterator[tuple[Ref, str]]:
        """((shard, place), sentence) of everything that is missing."""
        source = self._work.input("sentences")
        for number in self._work.missing_shards():
            texts = read_texts(source, number)
            self._open[number] = _OpenShard(len(texts), texts)
            for place, text in enumerate(texts):
                yield (number, place), text

    def add_all(self, outcomes: Iterator[tuple[Ref, Any]]) -> None:
        """Takes the outcome (stages.rewrite.chat.Outcome) of every sentence, in any order."""
        for (number, place), found in outcomes:
            shard = self._open[number]
            shard.rewrites.append(Rewrite(place, found.text, found.negative, found.reason))
            shard.left -= 1
            if not shard.left:
                self._work.put_shard(number, self._stage.kept(shard.texts, shard.rewrites))
                del self._open[number]
