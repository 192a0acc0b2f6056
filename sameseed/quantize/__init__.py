"""Shelf of quantizers: how codes are chosen for weights. One file, one method; `run.py` does a whole model."""
