"""Published studies, one per file: a grid of cells, tables and plots, and the published figures beside ours.

A study's file defines `STUDY`, a `Study` (_study.py). Its cells measure with the code of `sameseed.measure`.
"""
