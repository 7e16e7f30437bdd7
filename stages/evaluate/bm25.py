"""BM25, the ranking by words that retrieval is compared with (Robertson and Zaragoza 2009).

Lucene's variant: for a word of the query that n of N documents have, and this one f times,
ln(1 + (N - n + 0.5) / (n + 0.5)) f (k1 + 1) / (f + k1 (1 - b + b length / mean length)), summed
over the query's words, as often as they are there. Words are runs of letters and digits in lower
case, without stemming and stop words, so for any language that puts spaces between words.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from stages.errors import UserError
from stages.kinds import Kinds

K1, B = 1.2, 0.75


class Bm25:
    """An encoder of queries and documents whose products are BM25 scores.

    Vectors are rows of sparse arrays (N, words), 12 bytes a different word of each text. Documents
    are weighed among those that they are encoded with; queries are for the documents encoded last.
    """

    num_layers, num_parameters = 0, 0

    def encode_documents(self, texts: Sequence[str], kinds: Kinds = None) -> Any:
        """Raises UserError: there is no word in any of them."""
        from scipy.sparse import csr_array
        from sklearn.feature_extraction.text import CountVectorizer

        self._words = CountVectorizer(token_pattern=r"(?u)\w+", dtype=np.float32)
        try:
            counts = csr_array(self._words.fit_transform(texts))
        except ValueError:
            raise UserError(
                f"BM25: none of {len(texts):,} documents has a word; take the row out"
            ) from None
        num_with = np.bincount(counts.indices, minlength=counts.shape[1])
        idf = np.log1p((len(texts) - num_with + 0.5) / (num_with + 0.5))
        lengths = counts.sum(1)
        norms = K1 * (1 - B + B * lengths / lengths.mean())
        norm_of_each = np.repeat(norms, np.diff(counts.indptr))
        weights = idf[counts.indices] * counts.data * (K1 + 1) / (counts.data + norm_of_each)
        counts.data = weights.astype(np.float32)
        return counts

    def encode_unit(self, texts: Sequence[str], kinds: Kinds = None) -> Any:
        """Queries: how often they have each word of the documents."""
        from scipy.sparse import csr_array

        return csr_array(self._words.transform(texts))
