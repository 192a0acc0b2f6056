"""Shelf of quantizers: how codes are chosen for weights. One file, one method; `run.py` goes through a model with them."""
