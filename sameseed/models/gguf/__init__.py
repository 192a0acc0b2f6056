"""GGUF files: header, model config, weights and tokenizer."""
