"""Load tests of a server with OpenAI's API: prompts, request timing, metrics and records."""
