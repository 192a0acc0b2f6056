"""Models: one definition of the Llama family, its checkpoints, and ModelRunner, which runs a model with a KV cache."""
