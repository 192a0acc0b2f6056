"""The certificate: does speculation change anything? Checks that can fail, and wrong versions that they must reject."""
