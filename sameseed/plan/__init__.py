"""Planning: what a setting would bring, from costs and acceptance that were measured apart, and which one is best."""
