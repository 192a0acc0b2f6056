"""Shelf of drafters: one file, one way to guess. A module here defines `DRAFTER`, a class derived from Drafter.

`DRAFTER.build(options, runner, vocab_size)` makes one; `runner` is None unless the class says `needs_model = True`.
"""
