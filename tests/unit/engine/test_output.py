"""OutputText by example: what is held back, and what goes out at once. Its property is in property/test_text.py."""

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


def write(pieces, stop, rest=""):
    """The text, its deltas, and the number of tokens at the stop or None."""
    output = OutputText(Pieces(pieces, rest), stop)
    deltas = []
    for i in range(len(pieces)):
        if output.push(i):
            output.finish()
            return output.text, [*deltas, output.delta()], i + 1
        deltas.append(output.delta())
    output.finish()
    return output.text, [*deltas, output.delta()], None


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
