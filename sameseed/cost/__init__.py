"""What a round costs and brings: one model for those who decide, predict, choose and explain."""
