"""Models: the Llama family's one definition, its checkpoints, and ModelRunner, a model with a cache."""
