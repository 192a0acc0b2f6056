"""The four laws as checks of an engine that can fail, and wrong versions of the code that they must reject."""
