"""Translates sameseed's settings into the settings of other engines."""
