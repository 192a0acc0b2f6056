from __future__ import annotations

import numpy as np
import pytest

from sameseed.errors import ConfigError
from sameseed.spec.draft import Draft


def test_a_chain_is_a_thin_tree() -> None:
    draft = Draft.chains([[4, 5], [], [6]])
    assert draft.tokens.tolist() == [4, 5, 6]
    assert draft.parents.tolist() == [-1, 0, -1]
    assert draft.offsets.tolist() == [0, 2, 2, 3]
    assert draft.num_seqs == 3
    assert [draft.count(b) for b in range(3)] == [2, 0, 1]
    assert draft.nodes(0) == ([4, 5], [-1, 0])
    assert draft.nodes(1) == ([], [])
    assert draft.tokens.dtype == draft.parents.dtype == draft.offsets.dtype == np.int32


def test_empty() -> None:
    assert Draft.empty(2).offsets.tolist() == [0, 0, 0]
    assert Draft.empty(0).num_seqs == 0


def test_confidence_is_flat() -> None:
    draft = Draft.chains([[4, 5], [6]], [[0.9, 0.5], [0.25]])
    assert draft.confidence is not None
    assert draft.confidence.tolist() == pytest.approx([0.9, 0.5, 0.25])


def test_levels_stay_with_their_nodes() -> None:
    draft = Draft.trees([([4, 5, 6], [-1, 0, -1]), ([7], [-1])], levels=[[2, 1, 0], [1]])
    assert draft.node_levels(0) == [2, 1, 0]
    assert draft.kept([[0, 2], None]).node_levels(0) == [2, 0]
    assert draft.shallow([1, 1]).node_levels(0) == [2, 0]
    assert draft.shallow([1, 0]).node_levels(1) == []
    assert Draft.chains([[4, 5], []]).node_levels(0) == [0, 0]


def test_limits() -> None:
    Draft.trees([([1] * 64, [-1] * 64)])
    with pytest.raises(ConfigError, match="65 nodes; at most 64"):
        Draft.chains([[1] * 65])
    for parents in ([0], [-1, 1], [-1, 2, 0], [-2]):
        with pytest.raises(ConfigError, match="parents must come before"):
            Draft.trees([([1] * len(parents), parents)])


def test_nothing_follows_a_token_that_ends_a_text() -> None:
    draft = Draft.trees(
        [([5, 2, 6, 7], [-1, 0, 0, 1]), ([5, 2, 6], [-1, 0, 1])], [[0.9, 0.5, 0.4, 0.3], [0.9, 0.8, 0.7]]
    )
    cut = draft.ended([{2}, set()])
    assert [cut.nodes(b) for b in range(2)] == [([5, 2, 6], [-1, 0, 0]), ([5, 2, 6], [-1, 0, 1])]
    assert cut.confidence is not None and cut.confidence.tolist() == pytest.approx([0.9, 0.5, 0.4, 0.9, 0.8, 0.7])
    assert draft.ended([{9}, {8}]) is draft
