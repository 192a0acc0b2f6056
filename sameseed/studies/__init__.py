"""One file, one published study: a grid, its workload, its tables and plots, and the published figures beside ours.

A study's file defines `STUDY`, a `Study` (_study.py). Cells of its grid measure with the loops of `sameseed.study`.
"""
