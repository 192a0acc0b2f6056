"""The engine: Scheduler (who runs, how many rows each), Engine (the loop), LLM and AsyncLLM (the front doors)."""
