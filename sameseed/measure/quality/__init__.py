"""Quality: a model's perplexity and task scores, and what a number format costs, each value with an interval."""
