"""The paged KV cache: storage on the device (cache.py), block ownership (blocks.py), shared prefixes (prefix.py)."""
