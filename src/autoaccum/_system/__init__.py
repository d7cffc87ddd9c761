"""The process and what is around it."""
