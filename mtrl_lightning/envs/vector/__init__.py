"""Vector environments, stepped in worker processes."""
