"""What a student is worth while it trains: scores on dev sets, and agreement with its teachers."""

from collections.abc import Sequence

import numpy as np
import torch

from stages.encoder.config import num_positions
from stages.encoder.tokenizer import SentenceTokenizer, pad, token_budget_batches
from stages.evaluate.agreement import (
    NEAREST,
    of_pairs,
    pairs_of_bands,
    teachers_similarities,
)
from stages.evaluate.geometry import check_positives, geometry
from stages.evaluate.sts import spearman
from stages.evaluate.transfer import dev_accuracy, learned
from stages.kinds import Kinds
from stages.rows import unit_rows
from stages.train.engine import Engine
from stages.train.views import TrainingData

# Dev sentences are not cut like training sentences, as the model will not be when it is used; at
# most so many tokens keep a dev set cheap.
DEV_MAX_LENGTH = 128
# Sentences whose similarities to each other are compared with the teachers' (130,816 pairs).
AGREEMENT_ROWS = 512
# Agreement below which nothing can have been learned.
HARDLY = 10.0


class DevSets:
    """Spearman x 100 on each STS set's pairs and accuracy x 100 on each transfer task's rows, as
    often as asked for.

    geometry: alignment and uniformity by `alignment/SET`, of the student as it was at the last
        `scores`; with `positives_above` only, the gold score above which pairs mean the same.
    """

    def __init__(
        self, engine: Engine, data: TrainingData, positives_above: float | None = None
    ) -> None:
        encoder = engine.student.encoder
        positions = num_positions(encoder.backbone.config.to_dict())
        length = min(DEV_MAX_LENGTH, positions or DEV_MAX_LENGTH)
        settings = encoder.settings.model_copy(update={"max_length": length})
        tokenizer = SentenceTokenizer(encoder.tokenizer.pretrained, settings)
        self._engine, self._positives_above = engine, positives_above
        self._sets, self._tasks = data.dev, data.transfer
        self._splits = [learned(one.load()) for one in data.transfer]
        texts = dict.fromkeys(text for one in data.dev for text in one.sentence1 + one.sentence2)
        for splits in self._splits:
            texts |= dict.fromkeys(x for one in splits.values() for row in one.texts for x in row)
        self._row_of = {text: row for row, text in enumerate(texts)}
        if positives_above is not None:
            for one in data.dev:  # a data set of the hub is first read here
                check_positives(one, positives_above, "train.dev")
        self.geometry: dict[str, float] = {}
        self._vectors = _Vectors(engine, tokenizer(list(texts)))

    def scores(self) -> dict[str, float]:
        """By set; of the student as it is now."""
        vectors, row_of = self._vectors(), self._row_of
        unit, scores = unit_rows(vectors), {}
        for one in self._sets:
            left = unit[[row_of[text] for text in one.sentence1]]
            right = unit[[row_of[text] for text in one.sentence2]]
            scores[one.name] = 100 * spearman((left * right).sum(1), one.gold)
            if self._positives_above is not None:
                found = geometry(left, right, one.gold > self._positives_above)
                self.geometry |= {f"{name}/{one.name}": float(found[name].mean()) for name in found}
        return scores | self._accuracies(vectors)

    def _accuracies(self, vectors_ND: np.ndarray) -> dict[str, float]:
        """By transfer task; each is one worker's, whose figure is everyone's: all choose alike."""

        def encode(texts: Sequence[str], kinds: Kinds = None) -> np.ndarray:
            return vectors_ND[[self._row_of[text] for text in texts]]

        engine = self._engine
        device = engine.student.encoder.device
        found = torch.zeros(len(self._tasks), dtype=torch.float64, device=device)
        if not np.isfinite(vectors_ND).all():
            found.fill_(float("nan"))
        else:
            for place in range(engine.rank, len(self._tasks), engine.num_workers):
                schedule = self._tasks[place].schedule
                found[place] = dev_accuracy(self._splits[place], encode, schedule)
        found = engine.sum_over_workers(found)
        return {task.name: float(x) for task, x in zip(self._tasks, found, strict=True)}


class Agreement:
    """Spearman x 100 of the student's and its teachers' similarities, over pairs of the sentences
    that are held out; where none are, of some hundred that are trained on.

    The teachers' are mixed as in RankCSE Eq. 6. Sentences are read at training length.
    """

    def __init__(self, engine: Engine, data: TrainingData) -> None:
        rows = np.arange(data.num_held_out)
        if not len(rows):
            count = min(AGREEMENT_ROWS, data.num_rows)
            rows = data.sentences(
                np.random.default_rng(0).choice(data.num_rows, count, replace=False)
            )
        factors = [factor.take(rows) for factor in data.factors]
        self._teachers = of_pairs(teachers_similarities(factors, data.teacher_weights))
        self._near = pairs_of_bands(self._teachers)[NEAREST]
        self._vectors = _Vectors(engine, engine.student.tokenizers[0].wrap(data.tokens.take(rows)))

    def scores(self) -> dict[str, float]:
        """Over the pairs that the teachers find nearest, which says more about labelled pairs than
        all pairs do (docs/results.md); nan where either side's are all alike."""
        self._unit = unit_rows(self._vectors())
        own, near = of_pairs(self._unit @ self._unit.T), self._near
        return {"near pairs": 100 * spearman(own[near], self._teachers[near])}

    def of_all_pairs(self) -> float:
        """Of the student as it was at the last `scores`. All are ranked here, which takes 200 times
        as long as the near ones."""
        return 100 * spearman(of_pairs(self._unit @ self._unit.T), self._teachers)


class _Vectors:
    """Sentences, tokenised once, in batches that every worker cuts alike."""

    def __init__(self, engine: Engine, rows: list[np.ndarray]) -> None:
        encoder = engine.student.encoder
        self._engine, self._count = engine, len(rows)
        self._batches = []
        lengths = np.array([len(row) for row in rows])
        most = encoder.settings.batch_tokens(encoder.device.type)
        for batch in token_budget_batches(lengths, most):
            ids, mask = pad([rows[i] for i in batch], encoder.tokenizer.pad_id)
            tensors = [torch.from_numpy(x).to(encoder.device) for x in (ids, mask)]
            self._batches.append((batch, tensors[0], tensors[1]))

    def __call__(self) -> np.ndarray:
        """The student's present vectors (N, D), as they are pooled; spread over the workers."""
        engine, encoder = self._engine, self._engine.student.encoder
        vectors = torch.zeros(self._count, encoder.dimension, device=encoder.device)
        engine.student.eval()
        # every worker runs the same number of forwards (ZeRO-3 gathers weights in each)
        for turn in range(0, len(self._batches), engine.num_workers):
            mine = turn + engine.rank
            rows, ids, mask = self._batches[min(mine, len(self._batches) - 1)]
            with torch.no_grad():
                found, _ = engine.forward(ids, mask, {})
            if mine < len(self._batches):
                vectors[torch.from_numpy(rows)] = found
        return np.asarray(engine.sum_over_workers(vectors).cpu().numpy())
