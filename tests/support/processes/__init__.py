"""Processes that tests start, and how tests are shared out among workers."""
