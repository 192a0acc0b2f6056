"""`sameseed train`: train draft heads, small drafts, and pairs of a target and a draft distilled from it."""
