"""Saves memory in forward and backward passes: activation checkpointing, offloading, and heads and losses in chunks.

Takes modules; replaces what they compute by the same in less memory, within a block, and puts it back (`savings.py`
chooses). May import `_data`, `_memory`, `_system` and the modules in the package's root.
"""
