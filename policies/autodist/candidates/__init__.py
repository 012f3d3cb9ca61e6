"""What a search tries and finds, as data."""
