"""Promises: questions to any server with OpenAI's API, whose answers show whether texts depend on company or chance."""
