"""The commands of sameseed-lab."""
