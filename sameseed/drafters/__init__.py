"""Registry of drafters: one drafting method per file, which defines `DRAFTER`, a class derived from `Drafter`.

Files whose names begin with an underscore hold code that drafters share. Those with a model of their own need
`Followers`.
"""

from sameseed.drafters._followers import Followers

__all__ = ["Followers"]
