"""The registry of number formats: how one number of a weight or of the KV cache is stored. One file per format."""
