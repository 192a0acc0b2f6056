"""Quality: what a model gets right, and what a number format costs of it, each figure with its interval."""
