"""Drafters that look up: n-grams and suffixes, against searches of whole texts; the store of past texts."""

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from sameseed.drafters._history import History, TextStore
from sameseed.drafters.ngram import NgramDrafter
from sameseed.drafters.suffix import SuffixDrafter
from sameseed.errors import ConfigError
from sameseed.request import SamplingParams, Sequence


def by_hand(tokens, low, high, count):
    """The continuation of the latest earlier occurrence of the longest suffix; it may read on into its own copy."""
    for n in range(min(high, len(tokens) - 1), low - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                text = list(tokens)
                for i in range(count):
                    text.append(text[end + i])
                return text[len(tokens) :]
    return []


@given(
    start=st.lists(st.integers(0, 2), min_size=1, max_size=20),
    grown=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=6),
    low=st.integers(1, 3),
    more=st.integers(0, 3),
    count=st.integers(1, 8),
    back=st.lists(st.integers(0, 5), min_size=6, max_size=6),
)
@example(start=[1, 1], grown=[], low=1, more=0, count=3, back=[0])
@example(start=[1, 2, 8, 1, 2, 9, 1, 2], grown=[], low=2, more=2, count=1, back=[0])  # the latest occurrence wins
@example(start=[3, 1, 2, 8, 4, 1, 2, 9, 3, 1, 2], grown=[], low=2, more=2, count=1, back=[0])  # the longest suffix
@example(start=[3, 1, 2, 8, *[1, 2, 9] * 400, 3, 1, 2], grown=[], low=2, more=1, count=1, back=[0])  # however far
def test_equals_a_search(start, grown, low, more, count, back):
    """Also after tokens were taken back: the index forgets them."""
    drafter = NgramDrafter(NgramDrafter.Options(max_ngram=low + more, min_ngram=low))
    seq = Sequence(0, start, SamplingParams(), 0)
    for new, rewound in zip([[], *grown], [0, *back]):
        length = max(1, len(seq) - rewound)
        if length < len(seq):
            drafter.rewind(seq, length)
            del seq.token_ids[length:]
        seq.token_ids += new
        draft = drafter.propose([seq], [count])
        assert draft.tokens.tolist() == by_hand(seq.token_ids, low, low + more, count)
        assert draft.parents.tolist() == list(range(-1, len(draft.tokens) - 1))


TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=25), min_size=1, max_size=5)


def sequence(tokens, name=0, tenant=""):
    return Sequence(name, list(tokens), SamplingParams(), 0, tenant)


def options(**values):
    return SuffixDrafter(SuffixDrafter.Options(**values))


@given(TEXTS, st.integers(1, 3), st.integers(0, 4))
def test_finds_what_a_search_of_all_texts_finds(texts, ngram, more):
    history, known = History(ngram, 1000), [[] for _ in texts]
    for key, text in enumerate(texts):
        for token in text:  # token by token, as a sequence grows
            known[key].append(token)
            history.add(key, known[key])
    suffix, longest = texts[-1], ngram + more
    wanted = []
    for key, text in enumerate(texts):
        for end in range(ngram, len(text)):
            length = 0
            while length < min(longest, end, len(suffix)) and text[end - length - 1] == suffix[-length - 1]:
                length += 1
            if length >= ngram:
                wanted.append((key, end, length))
    found = [(i, p.end, p.length) for p in history.find(suffix, longest) for i, t in enumerate(known) if t is p.text]
    assert sorted(found) == sorted(wanted)


@given(TEXTS, st.integers(5, 40))
def test_the_oldest_texts_go_when_the_bound_is_reached(texts, bound):
    history = History(2, 8, bound)
    for key, text in enumerate(texts * 20):
        history.add(key, text)
        assert history.num_tokens <= max(bound, len(text) - 1)
        assert key in history._texts, "the latest stays"
    assert sum(map(len, history._places.values())) <= history.num_tokens, "no place is left of dropped texts"
    for text in texts:
        assert all(any(p.text is t for t in history._texts.values()) for p in history.find(text, 9))


def test_a_tree_by_how_often():
    drafter = options(past="none", min_match=2)
    text = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 4, 1, 2, 6, 9, 1, 2]
    draft = drafter.propose([sequence(text)], [12])
    tokens, parents = draft.nodes(0)
    follows = Counter(text[i + 2] for i in range(len(text) - 2) if text[i : i + 2] == [1, 2])
    assert (tokens[0], parents[0]) == (3, -1)
    assert draft.confidence[0] == pytest.approx(follows[3] / follows.total())
    by_token = dict(zip(tokens, zip(parents, draft.confidence.tolist())))
    assert by_token[4] == (0, pytest.approx(0.75 * 2 / 3))
    assert by_token[6] == (-1, pytest.approx(0.25))
    assert by_token[5] == (0, pytest.approx(0.75 / 3))


def test_a_longer_match_makes_a_longer_draft():
    text = list(range(40))
    drafter = options(past="none", min_match=2, length_factor=1.5)
    lengths = []
    for match in (2, 4, 8):
        seq = sequence([*text, 99, *text[10 - match : 10]], match)
        lengths.append(len(drafter.propose([seq], [64]).tokens))
    assert lengths == [3, 6, 12]


def test_rare_branches_are_left_out():
    often = [7, 8, 1] * 9
    text = [*often, 7, 8, 2, 3, 7, 8]
    some, all_ = (options(past="none", min_probability=p).propose([sequence(text)], [8]) for p in (0.2, 0.0))
    assert 2 not in some.tokens.tolist()
    assert 2 in all_.tokens.tolist()


def test_repetition_goes_on_past_the_end():
    drafter = options(past="none", min_match=1, length_factor=8.0)
    assert drafter.propose([sequence([5, 1, 2, 1, 2, 1])], [6]).tokens.tolist()[:5] == [2, 1, 2, 1, 2]


def ended(drafter, tokens, name, tenant=""):
    seq = sequence(tokens, name, tenant)
    drafter.propose([seq], [1])
    drafter.release(seq)


STORY = [11, 12, 13, 14, 15, 16, 17, 18]


@pytest.mark.parametrize(
    ("past", "mine", "others"), [("tenant", True, False), ("all", True, True), ("none", False, False)]
)
def test_whose_past_is_looked_at(past, mine, others):
    drafter = options(past=past)
    ended(drafter, STORY, 1, "ann")
    for tenant, seen in (("ann", mine), ("bob", others)):
        draft = drafter.propose([sequence([99, 11, 12, 13], 2, tenant)], [3])
        assert draft.tokens.tolist() == ([14, 15, 16] if seen else [])


def test_a_live_sequence_is_nobody_elses_business():
    drafter = options(past="all")
    drafter.propose([sequence(STORY, 1)], [3])
    assert not len(drafter.propose([sequence([11, 12, 13], 2)], [3]).tokens)


def test_the_store_outlives_the_drafter(tmp_path):
    def make():
        chosen = SuffixDrafter.Options(past="all", store=str(tmp_path / "texts"))
        return SuffixDrafter(chosen, 100)

    first = make()
    ended(first, STORY, 1)
    ended(first, [1, 2, 3], 2)
    assert make().propose([sequence([11, 12, 13])], [3]).tokens.tolist() == [14, 15, 16]


def test_the_store_keeps_the_latest(tmp_path):
    store = TextStore(tmp_path / "t", 10, 50)
    for i in range(30):
        store.append([i, i + 1, i + 2])
    assert store.read() == [[27, 28, 29], [28, 29, 30], [29, 30, 31]]
    assert (tmp_path / "t").stat().st_size < 200


@pytest.mark.parametrize("cut", [1, 5, 13])
def test_a_store_cut_off_keeps_what_is_whole(tmp_path, cut):
    store = TextStore(tmp_path / "t", 100, 50)
    store.append([1, 2])
    store.append([3, 4])
    data = (tmp_path / "t").read_bytes()
    (tmp_path / "t").write_bytes(data[:-cut])
    assert store.read() == [[1, 2]]
    store.append([5])
    assert store.read() == [[1, 2], [5]]


def test_requests_outlive_a_store_that_fails(tmp_path, caplog):
    folder = tmp_path / "gone"
    folder.mkdir()
    drafter = options(past="all", store=str(folder / "texts"))
    folder.rmdir()
    for name in range(2):
        seq = sequence([1, 2, 3, 4], name)
        drafter.propose([seq], [2])
        drafter.release(seq)
    assert [r.message.startswith("the store") for r in caplog.records] == [True], "it is said once"
    assert drafter.propose([sequence([7, 1, 2], 9)], [2]).count(0) == 2, "in memory the texts live on"


def test_a_full_disk_leaves_whole_texts(tmp_path, caplog):
    resource = pytest.importorskip("resource")
    path = tmp_path / "t"
    store = TextStore(path, 100, 50)
    store.append([1, 2])
    whole, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, limits[1]))
    try:
        store.append([3, 4])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == whole and "make room" in caplog.text
    store.append([5])
    assert path.read_bytes() == whole, "what failed is not tried again"


def test_bad_stores(tmp_path):
    path = tmp_path / "t"
    TextStore(path, 100, 50).append([1])
    with pytest.raises(ConfigError, match="50 tokens, not 60"):
        TextStore(path, 100, 60).read()
    path.write_bytes(b"something else entirely")
    with pytest.raises(ConfigError, match="no store of texts"):
        TextStore(path, 100, 50).read()
    with pytest.raises(ConfigError, match=r"make .*missing first"):
        TextStore(tmp_path / "missing" / "t", 100, 50)
    with pytest.raises(ConfigError, match="is a folder"):
        TextStore(tmp_path, 100, 50)
