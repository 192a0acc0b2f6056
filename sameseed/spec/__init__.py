"""Speculation: drafts, the acceptance rule, length policies, and the decoding step that all levels share."""
