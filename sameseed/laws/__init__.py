"""The four laws as checks that an engine can fail, and wrong versions of the code that the checks must reject."""
