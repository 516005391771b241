"""Which tokens of the answers of a pair are learned."""

import numpy as np
import pytest

from zero.corpus.preparing.tokenize_documents import Tokens, learned_from_one_token


@pytest.mark.quick
@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([([1, 2, 3], [0, 0, 1]), ([1, 2, 4], [0, 0, 1])], [[0, 0, 1], [0, 0, 1]]),
        ([([1, 2, 3, 4], [0, 0, 1, 1]), ([1, 2, 3], [0, 0, 1])], [[0, 0, 1, 1], [0, 0, 1]]),  # answers begin alike
        ([([1, 9, 3], [0, 1, 1]), ([1, 2, 4], [0, 0, 1])], [[0, 1, 1], [0, 1, 1]]),  # 9 is the prompt's end as well
        ([([9, 3], [1, 1]), ([1, 2, 4], [0, 0, 1])], [[1, 1], [1, 1, 1]]),  # it is all of the prompt
        ([([1, 2, 3], [0, 0, 1]), ([1, 2], [0, 0])], [[0, 0, 1], [0, 0]]),  # an empty answer has nothing to learn
        ([([1, 2, 3], [0, 1, 0])], [[0, 1, 0]]),  # no pair
    ],
)
def test_answers_of_a_pair(texts: list[tuple[list[int], list[int]]], expected: list[list[int]]) -> None:
    """Both from one token on, and no token of the prompt that both texts have as the prompt alone has it."""
    given = [Tokens(np.array(ids), np.array(is_learned, np.uint8)) for ids, is_learned in texts]
    found = [text.is_learned for text in learned_from_one_token(given)]
    assert [text.tolist() for text in found if text is not None] == expected
