"""`python -m foretoken`: the same as the `foretoken` command."""

from __future__ import annotations

import sys

from foretoken.cli import main

sys.exit(main())
