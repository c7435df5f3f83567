"""Where routing traces come from."""
