"""GGUF files: header, shape of the model, weights and tokenizer."""
