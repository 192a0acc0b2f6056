"""The engine: Scheduler (which sequences run, with how many rows), Engine (the loop), LLM and AsyncLLM (the API)."""
