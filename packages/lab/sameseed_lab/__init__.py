"""Companion of sameseed: published studies repeated here, and twins of real models' shapes."""
