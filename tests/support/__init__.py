"""What several test files use; each package says what is in it."""
