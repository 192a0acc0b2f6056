"""The paged KV cache: rows on the device (cache.py), and which rows are whose (blocks.py)."""
