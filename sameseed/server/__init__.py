"""The HTTP server with OpenAI's API. The engine runs in a separate process; the server process loads no weights."""
