"""What an optimizer keeps and does, asked of the optimizer itself."""
