"""Load on a server that speaks OpenAI's API: what is sent, how it is timed, what it comes to."""
