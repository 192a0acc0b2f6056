"""Promises: test any server with OpenAI's API for whether its texts depend on other requests or on chance."""
