"""Bad values for every public argument and option."""
