"""Many environments, stepped together in worker processes."""
