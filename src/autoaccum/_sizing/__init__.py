"""Sizes."""
