"""The server: OpenAI's API over one engine, which runs in a process of its own. This side loads no weights."""
