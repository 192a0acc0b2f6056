"""Shelf of drafters: one file, one way to guess. A module here defines `DRAFTER`, a class derived from Drafter.

A drafter that needs no model is built as `DRAFTER(options)`; one that owns a model (`needs_model = True`) as
`DRAFTER(options, runner)`.
"""
