"""Whole trainings that several test files run."""
