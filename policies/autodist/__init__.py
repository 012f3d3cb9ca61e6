"""``autodist``: search for the best plan, and say how far from the best it can be."""
