"""Plans and their costs for people: differences, explanations, reports."""
