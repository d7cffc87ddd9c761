"""Samples, loaders, and records as the package makes them."""
