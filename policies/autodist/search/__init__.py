"""The steps of a search for the best plan."""
