"""The registry of number formats: what a stored number is, for weights and for the KV cache. One file, one format."""
