"""The node of rewrites that the user has: a file joined to the sentences, all shards in one go."""

from dataclasses import dataclass
from typing import Any

from stages.contract import Work
from stages.rewrite.stage import Rewrites
from stages.sentences.stage import read_texts


@dataclass(frozen=True)
class JoinedPairs(Rewrites):
    """`unicode`: normal form of the sentences; keys and rewrites are cleaned alike."""

    unicode: str

    def check(self) -> None:
        from stages.rewrite.pairs import pair_table
        from stages.sentences.sources import read_table

        super().check()
        assert self.settings.pairs is not None
        next(read_table(pair_table(self.settings.pairs, f"{self.where}.pairs")), None)

    def make(self, work: Work, loaded: Any) -> None:
        from stages.rewrite.pairs import PairFile

        settings, sentences = self.settings.pairs, work.input("sentences")
        assert settings is not None
        texts = (read_texts(sentences, number) for number in sentences.shard_numbers)
        pairs = PairFile(settings, texts, self.unicode, f"{self.where}.pairs")
        for number, rewrites in enumerate(pairs.shards()):
            work.put_shard(number, self.kept(read_texts(sentences, number), rewrites))
        if pairs.num_unknown:
            work.say(f"{pairs.num_unknown:,} rows of {settings.path} were left out", important=True)
        self.publish(work, pairs.unknown, {"rows_left_out": pairs.num_unknown})
