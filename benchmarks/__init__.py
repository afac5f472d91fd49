"""The program measuring itself: what it survives, and how fast it is. Nothing is imported here: workers come by."""
