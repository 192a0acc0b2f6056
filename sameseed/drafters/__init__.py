"""Registry of drafters: one file, one way to guess. A module here defines `DRAFTER`, a class derived from `Drafter`.

`DRAFTER.build(options, parts)` makes one for a target. Files that begin with an underscore are what drafters share;
those with a model of their own need `Followers` and `write_chains`.
"""

from sameseed.drafters._chains import write_chains
from sameseed.drafters._followers import Followers

__all__ = ["Followers", "write_chains"]
