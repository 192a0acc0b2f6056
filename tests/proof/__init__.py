"""Checks that depend on nothing of a user's, toy models, and wrong versions of the code that all checks must reject."""
