"""Shelf of number formats: what a stored number is, for weights and for the KV cache alike. One file, one format."""
