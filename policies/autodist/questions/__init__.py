"""Questions about a plan: why it looks as it does, and what would change it."""
