"""Speculation: drafts, the one acceptance rule, length policies, and the step that every level of it shares."""
