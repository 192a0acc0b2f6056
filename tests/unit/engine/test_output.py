"""OutputText: stop strings across token boundaries, and deltas that are never retracted."""

import hypothesis.strategies as st
from hypothesis import example, given

from sameseed.engine.running import OutputText


class Pieces:
    """A tokenizer whose token i is the i-th piece; a piece may be empty (half a character)."""

    def __init__(self, pieces, rest=""):
        self.pieces, self.rest = pieces, rest

    tail = ""

    def stream(self, skip_special_tokens, before):
        return self

    def push(self, token_id):
        return self.pieces[token_id]

    def flush(self):
        return self.rest


def write(pieces, stop, first=0, rest=""):
    """The text, its deltas, and the number of tokens at the stop or None; stops count from token `first` on."""
    output = OutputText(Pieces(pieces, rest), stop)
    deltas = []
    for i in range(len(pieces)):
        if output.push(i, may_stop=i >= first):
            output.finish()
            return output.text, [*deltas, output.delta()], i + 1
        deltas.append(output.delta())
    output.finish()
    return output.text, [*deltas, output.delta()], None


def by_hand(pieces, stop, first):
    """The same, by a search of the whole text after each token."""
    text = ""
    for i, piece in enumerate(pieces):
        known, text = len(text), text + piece
        ends = [
            at for s in stop for at in range(len(text)) if text.startswith(s, at) and known < at + len(s) and i >= first
        ]
        if ends:
            return text[: min(ends)], i + 1
    return text, None


letters = st.text("ab", max_size=4)


@given(
    pieces=st.lists(letters, max_size=12),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3).map(tuple),
    first=st.integers(0, 4),
)
@example(pieces=["ab", "aab", "b"], stop=("aabb", "b"), first=2)
@example(pieces=["a", "a", "a", "b"], stop=("aab",), first=0)
def test_stops_equal_a_search_of_the_whole_text(pieces, stop, first):
    text, deltas, count = write(pieces, stop, first)
    assert (text, count) == by_hand(pieces, stop, first)
    assert "".join(deltas) == text, "what was given out stands"


def test_a_tail_that_may_become_a_stop_is_held_back():
    text, deltas, count = write(["one E", "N", "Dless ", "EN", "D more"], ("END",))
    assert (text, deltas[:2], count) == ("one ", ["one ", ""], 3)
    text, deltas, count = write(["one E", "N", "d ", "E", "N"], ("END",))
    assert deltas == ["one ", "", "ENd ", "", "", "EN"]
    assert count is None


def test_what_no_stop_can_hold_back_goes_out_at_once():
    assert write(["a", "", "b"], ())[1] == ["a", "", "b", ""]
    assert write(["a", ""], ("zz",), rest="\ufffd") == ("a\ufffd", ["a", "", "\ufffd"], None)
    assert write(["a", "XY"], ("X",), rest="\ufffd") == ("a", ["a", ""], 2), "nothing follows a stop"
