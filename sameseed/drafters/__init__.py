"""Registry of drafters: one drafting method per file. A module here defines `DRAFTER`, a class derived from `Drafter`.

`DRAFTER.build(options, parts)` makes a drafter for a target. Files whose names begin with an underscore hold code that
drafters share. Drafters with a model of their own need `Followers`.
"""

from sameseed.drafters._followers import Followers

__all__ = ["Followers"]
