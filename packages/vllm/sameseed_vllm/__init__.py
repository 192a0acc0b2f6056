"""Companion of sameseed: vLLM as the engine behind its server, and flags and files for other engines."""
